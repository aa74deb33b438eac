// Attention over keys and values that lie in blocks of BLOCK tokens, read where they are.
//
// A tile is a few rows of one sequence times the query heads that share one key head, so that keys are read once for all
// of them.  The result of a row depends on that row alone: the tokens it sees are cut into parts of PART by position; the
// scores, maximum, sum and mixed values of a part are computed in one order, and parts are merged in order, whatever is
// computed beside them.
//
// Layouts of one head in one block, D the head's width padded to a multiple of FEATURES:
//   floats  keys    [D][16 tokens]
//           values  [16 tokens][D]
//   codes   keys    [D / 2][16 tokens][2] 16-bit numbers; then scales [D / FEATURES][16 tokens]
//           values  [4][D][4 tokens] bytes, each a code + 128; then scales [16 tokens]
// So a register of either is one load, without shuffles or sums over lanes.
//
// With codes, arithmetic between the roundings is exact: keys and queries are rounded to 14 bits with a scale for FEATURES
// of them, values to 8 bits, and attention weights to 14 bits.  Keys in 8 bits lose their content if a bias is added to
// them (Qwen2: up to 211).  Weights in 8 bits lose what hundreds of tokens share beside one dominant token (attention
// sinks, Xiao et al. 2024).
#pragma once

#include "rows.hpp"

constexpr int BLOCK = 16;   // tokens
constexpr int PART = 256;   // tokens
constexpr int PART_BLOCKS = PART / BLOCK;
constexpr int MAX_QUERIES = REGISTERS == 32 ? 12 : 4;  // of a tile: rows times heads
constexpr int FEATURES = 32;           // of a key or a query that share a scale
constexpr float MAX_KEY_CODE = 8191;       // of 14 bits and a sign: FEATURES products of two still fit 32 bits
constexpr float MAX_WEIGHT_CODE = 16383;   // of 14 bits

using Codes = uint8_t;

// Bytes that one head takes in one block.
template <class T>
constexpr size_t key_bytes(int width) {
    return sizeof(T) == 1 ? width * BLOCK * sizeof(int16_t) + width / FEATURES * BLOCK * sizeof(float) : width * BLOCK * sizeof(T);
}
template <class T>
constexpr size_t value_bytes(int width) {
    return width * BLOCK * sizeof(T) + (sizeof(T) == 1 ? BLOCK * sizeof(float) : 0);
}
INLINE const float* key_scales(const Codes* block, int width) { return (const float*)(block + width * BLOCK * 2); }
INLINE float* key_scales(Codes* block, int width) { return (float*)(block + width * BLOCK * 2); }
INLINE const float* value_scales(const Codes* block, int width) { return (const float*)(block + width * BLOCK); }
INLINE float* value_scales(Codes* block, int width) { return (float*)(block + width * BLOCK); }

// What changes the scores of R queries, which are exponents of two, before the softmax.
struct ScoreChange {
    float cap;                 // scores s become cap * tanh(s / cap); 0: they do not
    bool by_distance;          // then a token's distance times the query's rate is subtracted
    float rates[MAX_QUERIES];
    int positions[MAX_QUERIES];
};

// Queries of a tile [R, D], as floats or as codes with a scale for FEATURES of them.
struct Queries {
    float* floats;
    int16_t* codes;
    float* scales;
    int inputs;  // D
    const ScoreChange* change;  // null: none
};

// Rounds FEATURES floats to codes.  Returns the scale, NaN if one of them is infinite or NaN.
INLINE float encode_wide(const float* values, int16_t* codes) {
    Floats nonfinite = zero();
    const float most = peak<FEATURES>(values, nonfinite);
    const Floats inverted = all(inverse(most, MAX_KEY_CODE));
    UNROLL(FEATURES / LANES, i, store_wide_codes(codes + i * LANES, mul(load(values + i * LANES), inverted)));
    return is_nan(nonfinite) ? NAN : most / MAX_KEY_CODE;
}

// Stores one token's key and value of one head, [width] each, in its block.
inline void store_head(float* keys, float* values, int token, const float* key, const float* value, int width, int padded) {
    for (int d = 0; d < width; ++d) keys[d * BLOCK + token] = key[d];
    memcpy(values + token * padded, value, size_t(width) * sizeof(float));
}
inline void store_head(Codes* keys, Codes* values, int token, const float* key, const float* value, int width, int padded) {
    alignas(64) float padded_group[FEATURES];
    alignas(64) int16_t wide[FEATURES];
    auto group = [&](const float* x, int d) {
        if (d + FEATURES <= width) return x + d;
        std::copy_n(x + d, width - d, padded_group);
        std::fill(padded_group + width - d, padded_group + FEATURES, 0.f);
        return (const float*)padded_group;
    };
    Floats nonfinite = zero();
    float most = 0;
    for (int d = 0; d < padded; d += FEATURES) most = std::max(most, peak<FEATURES>(group(value, d), nonfinite));
    value_scales(values, padded)[token] = is_nan(nonfinite) ? NAN : most / 127.f;
    Codes* value_codes = values + token / 4 * 4 * padded;
    const Floats inverted = all(inverse(most, 127.f));
    for (int d = 0; d < padded; d += FEATURES) {
        const float* from = group(value, d);
        UNROLL(FEATURES / LANES, i, store_fourth(value_codes + 4 * (d + i * LANES), token % 4, mul(load(from + i * LANES), inverted)));
    }
    for (int d = 0; d < padded; d += FEATURES) {
        key_scales(keys, padded)[d / FEATURES * BLOCK + token] = encode_wide(group(key, d), wide);
        for (int i = 0; i < FEATURES; i += 2) memcpy(keys + 2 * ((d + i) * BLOCK + 2 * token), wide + i, 4);
    }
}

// Rounds query `row` of a tile from q.floats to codes.
inline void prepare_query(const Queries& q, int row) {
    for (int d = row * q.inputs; d < (row + 1) * q.inputs; d += FEATURES)
        q.scales[d / FEATURES] = encode_wide(q.floats + d, q.codes + d);
}

// The keys of R queries: tokens [from[r], to[r]) of a sequence whose blocks are keys[b] and values[b].  After the last
// pointer there are AHEAD more, to any readable memory, for prefetching.
constexpr int AHEAD = 8;
template <class T>
struct KeyRange {
    const T* const* keys;
    const T* const* values;
    int from[MAX_QUERIES], to[MAX_QUERIES];
};

// A part's maximum and sum for one query; its mixed values are not divided by the sum yet.
struct Outcome {
    float most, sum;
};

// The lanes of v (tokens from i on) within [from, to); `rest` in the others.
INLINE Floats masked(Floats v, int i, int from, int to, float rest) {
    if (i + LANES > to) v = first(v, to - i, rest);
    return i < from ? past(v, from - i, rest) : v;
}

// The hardware does not prefetch across blocks: fetch a line of the next block for each line that is read, to the
// second-level cache, which waits for more lines at once than the first does.
template <int R, int B, class T>
INLINE void prefetch_lines(const T* const* blocks, const T* const* values, int at) {
    if constexpr (R <= 4) { UNROLL(B, b, prefetch_later(values[b] + at); prefetch_later(blocks[b + B] + at)); }
}
// As codes, values take half the memory of keys.
template <int R, int B>
INLINE void prefetch_lines(const Codes* const* blocks, const Codes* const* values, int at, bool even) {
    if constexpr (R <= 4) { UNROLL(B, b, if (even) prefetch_later(values[b] + at / 2); prefetch_later(blocks[b + B] + at)); }
}

template <int R, int B>
INLINE void score_blocks(const Queries& q, const float* const* blocks, const float* const* values, float* scores) {
    for (int token = 0; token < BLOCK; token += LANES) {
        Floats f[R][B];
        UNROLL(R, r, UNROLL(B, b, f[r][b] = zero()));
        for (int d = 0; d < q.inputs; ++d) {
            Floats key[B];
            UNROLL(B, b, key[b] = load(blocks[b] + d * BLOCK + token));
            prefetch_lines<R, B>(blocks, values, d * BLOCK);
            UNROLL(R, r, Floats x = all(q.floats[r * q.inputs + d]); UNROLL(B, b, f[r][b] = fma(key[b], x, f[r][b])));
        }
        UNROLL(R, r, UNROLL(B, b, store(scores + r * PART + b * BLOCK + token, f[r][b])));
    }
}
template <int R, int B>
INLINE void score_blocks(const Queries& q, const Codes* const* blocks, const Codes* const* values, float* scores) {
    const int groups = q.inputs / FEATURES;
    for (int token = 0; token < BLOCK; token += LANES) {
        Cursor<R, int16_t> at(q.codes, q.inputs);
        Floats f[R][B];
        UNROLL(R, r, UNROLL(B, b, f[r][b] = zero()));
        for (int g = 0, line = 0; g < groups; ++g) {
            Ints a[R][B];
            UNROLL(R, r, UNROLL(B, b, a[r][b] = all_ints(0)));
            for (int u = 0; u < FEATURES / 2; ++u, line += 4 * BLOCK) {
                Ints key[B];
                UNROLL(B, b, key[b] = load_codes(blocks[b] + line + 4 * token));
                prefetch_lines<R, B>(blocks, values, line, u % 2 == 0);
                UNROLL(R, r, Two x = two(at.row(r)); UNROLL(B, b, a[r][b] = dot(a[r][b], key[b], x)));
                at.advance(2);
            }
            prefetch_lines<R, B>(blocks, values, (2 * q.inputs + 4 * g) * BLOCK, g == 0);
            Floats scales[B];
            UNROLL(B, b, scales[b] = load(key_scales(blocks[b], q.inputs) + g * BLOCK + token));
            UNROLL(R, r, Floats x = all(q.scales[r * groups + g]);
                UNROLL(B, b, f[r][b] = fma(to_floats(a[r][b]), mul(scales[b], x), f[r][b])));
        }
        UNROLL(R, r, UNROLL(B, b, store(scores + r * PART + b * BLOCK + token, f[r][b])));
    }
}

// The keys of R queries in one part: tokens [from[r], to[r]), all within [low, high).
template <int R>
struct Span {
    int from[R], to[R], low = PART, high = 0;
};

// Changes the scores of query r for tokens [from, to) of a part that begins at token `start`.
__attribute__((noinline)) inline void change_scores(const ScoreChange& change, int r, int start, int from, int to,
                                                    float* scores) {
    alignas(64) float lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = float(i);
    for (int i = from / LANES * LANES; i < to; i += LANES) {
        Floats s = load(scores + i);
        if (change.cap) s = capped(s, change.cap);
        if (change.by_distance) {
            const Floats distance = magnitude(add(load(lanes), all(float(start + i - change.positions[r]))));
            s = fma(distance, all(-change.rates[r]), s);
        }
        store(scores + i, s);
    }
}

// Replaces scores of one query, exponents of two, by weights 2^(score - most), after `of`; only within [from, to).
template <class F>
INLINE Outcome softmax_weights(float* scores, int from, int to, F&& of) {
    if (from >= to) return {-INFINITY, 0.f};
    Floats top = all(-INFINITY), s = zero();
    const int begin = from / LANES * LANES;
    for (int i = begin; i < to; i += LANES) top = largest(top, masked(load(scores + i), i, from, to, -INFINITY));
    const float most = highest(top);
    for (int i = begin; i < to; i += LANES) {
        Floats e = masked(binary_power(sub(load(scores + i), all(most))), i, from, to, 0.f);
        s = add(s, e);
        store(scores + i, of(i, e));
    }
    return {most, sum(s)};
}

template <int R, int Z>
INLINE void mix_floats(const float* weights, const float* const* blocks, const Span<R>& span, int width, int d, float* out) {
    Floats f[R][Z];
    UNROLL(R, r, UNROLL(Z, z, f[r][z] = zero()));
    for (int i = span.low; i < span.high; ++i) {
        const float* at = blocks[i / BLOCK] + i % BLOCK * width + d;
        Floats v[Z];
        UNROLL(Z, z, v[z] = load(at + z * LANES));
        UNROLL(R, r, Floats w = all(weights[r * PART + i]); UNROLL(Z, z, f[r][z] = fma(v[z], w, f[r][z])));
    }
    UNROLL(R, r, UNROLL(Z, z, store(out + r * width + d + z * LANES, f[r][z])));
}
// Scores [R][PART] to outcomes [R] and mixed values [R][D].
template <int R>
INLINE void mix(float* scores, const float* const* blocks, const Span<R>& span, int width, float* out, Outcome* outcomes) {
    for (int r = 0; r < R; ++r) {
        float* row = scores + r * PART;
        outcomes[r] = softmax_weights(row, span.from[r], span.to[r], [](int, Floats e) { return e; });
        std::fill(row + span.low, row + std::max(span.low, span.from[r]), 0.f);
        std::fill(row + std::min(span.to[r], span.high), row + span.high, 0.f);
    }
    constexpr int Z = R <= 4 && REGISTERS == 32 ? 4 : 2;
    int d = 0;
    for (; d + Z * LANES <= width; d += Z * LANES) mix_floats<R, Z>(scores, blocks, span, width, d, out);
    for (; d < width; d += 2 * LANES) mix_floats<R, 2>(scores, blocks, span, width, d, out);
}

// The weights of R queries for codes of values: `unit` times an integer, stored as two digits of 7 bits.
template <int R>
struct Digits {
    alignas(64) int8_t high[R][PART], low[R][PART];
    int32_t sum[R];
    float unit[R];

    void clear(int r, int begin, int end) {
        if (begin >= end) return;
        memset(high[r] + begin, 0, end - begin);
        memset(low[r] + begin, 0, end - begin);
    }
};

template <int R, int Z>
INLINE void mix_codes(const Digits<R>& w, const Codes* const* blocks, const Span<R>& span, int width, int d, float* out) {
    Ints a[R][Z], b[R][Z];
    UNROLL(R, r, UNROLL(Z, z, a[r][z] = b[r][z] = all_ints(0)));
    for (int i = span.low / 4 * 4; i < span.high; i += 4) {
        const Codes* at = blocks[i / BLOCK] + i % BLOCK * width + 4 * d;
        Ints v[Z];
        UNROLL(Z, z, v[z] = load_codes(at + 4 * z * LANES));
        UNROLL(R, r, Four x = four(w.high[r] + i); UNROLL(Z, z, a[r][z] = dot(a[r][z], v[z], x));
            Four y = four(w.low[r] + i); UNROLL(Z, z, b[r][z] = dot(b[r][z], v[z], y)));
    }
    UNROLL(R, r, Ints offset = all_ints(-128 * w.sum[r]); Floats unit = all(w.unit[r]);
        UNROLL(Z, z, Floats f = to_floats(add_ints(of_digits(a[r][z], b[r][z]), offset));
            store(out + r * width + d + z * LANES, mul(f, unit))));
}
// Only tokens within a query's range are read: others may be NaN, or no tokens.
template <int R>
INLINE void mix(float* scores, const Codes* const* blocks, const Span<R>& span, int width, float* out, Outcome* outcomes) {
    Digits<R> w;
    const int first = span.low / LANES * LANES, last = (span.high + 3) / 4 * 4;  // of what mix_codes reads, and before it
    for (int r = 0; r < R; ++r) {
        float* row = scores + r * PART;
        const int from = span.from[r], to = span.to[r];
        Floats top = zero(), nonfinite = zero();
        outcomes[r] = softmax_weights(row, from, to, [&](int i, Floats e) INLINED {
            Floats scale = load(value_scales(blocks[i / BLOCK], width) + i % BLOCK);
            e = masked(mul(e, scale), i, from, to, 0.f);
            top = largest(top, e);
            nonfinite = fma(e, zero(), nonfinite);
            return e;
        });
        const float most = highest(top);
        const Floats scale = all(inverse(most, MAX_WEIGHT_CODE));
        Ints sum = all_ints(0);
        int i = from / LANES * LANES;
        w.clear(r, first, from < to ? i : last);
        for (; i < to; i += LANES) store_digits(w.high[r] + i, w.low[r] + i, mul(load(row + i), scale), sum);
        if (from < to) w.clear(r, i, last);
        const bool finite = !is_nan(nonfinite);
        w.sum[r] = finite ? sum_ints(sum) : 0;  // the sum of NaN codes may overflow
        w.unit[r] = finite ? most / MAX_WEIGHT_CODE : NAN;
    }
    constexpr int Z = REGISTERS < 32 ? (R <= 3 ? 2 : 1) : R <= 3 ? 4 : R <= 6 ? 2 : 1;
    int d = 0;
    for (; d + Z * LANES <= width; d += Z * LANES) mix_codes<R, Z>(w, blocks, span, width, d, out);
    if constexpr (Z > 2)
        for (; d < width; d += 2 * LANES) mix_codes<R, 2>(w, blocks, span, width, d, out);
}

// Attention of R queries [R][D] over one part, to mixed [R][D] and outcomes [R].  `scores` is scratch for [R][PART].
template <int R, class T>
void attend_part(const Queries& q, const KeyRange<T>& range, int part, float* scores, float* mixed, Outcome* outcomes) {
    constexpr int SUMS = REGISTERS == 32 ? 12 : 6;  // that the registers hold
    constexpr int B = R * 4 <= SUMS ? 4 : R * 2 <= SUMS ? 2 : 1;
    const int start = part * PART;
    Span<R> span;
    for (int r = 0; r < R; ++r) {
        const int from = std::clamp(range.from[r] - start, 0, PART), to = std::clamp(range.to[r] - start, 0, PART);
        if (from < to) { span.low = std::min(span.low, from); span.high = std::max(span.high, to); }
        span.from[r] = from;
        span.to[r] = to;
    }
    const T* const* keys = range.keys + part * PART_BLOCKS;
    const T* const* values = range.values + part * PART_BLOCKS;
    const int last = (span.high + BLOCK - 1) / BLOCK;
    int b = span.low / BLOCK;
    for (; b + B <= last; b += B) score_blocks<R, B>(q, keys + b, values + b, scores + b * BLOCK);
    if constexpr (B > 1) for (; b < last; ++b) score_blocks<R, 1>(q, keys + b, values + b, scores + b * BLOCK);
    if (q.change)
        for (int r = 0; r < R; ++r) change_scores(*q.change, r, start, span.from[r], span.to[r], scores + r * PART);
    mix<R>(scores, values, span, q.inputs, mixed, outcomes);
}

// Merges one more part into the result so far; [D] values each.
inline void merge(Outcome& sum, float* mixed, const Outcome& part, const float* more, int width) {
    if (part.most == -INFINITY && part.sum == 0.f) return;
    const float most = std::max(sum.most, part.most);
    const float keep = sum.sum == 0.f && sum.most == -INFINITY ? 0.f : std::exp2(sum.most - most);
    const float take = std::exp2(part.most - most);
    sum = {most, sum.sum * keep + part.sum * take};
    for (int d = 0; d < width; d += LANES)
        store(mixed + d, fma(load(more + d), all(take), mul(load(mixed + d), all(keep))));
}

// A learned score for no key, an exponent of two, takes its share of the softmax (Xiao et al. 2024).
inline void add_sink(Outcome& sum, float* mixed, float sink, int width) {
    const float most = std::max(sum.most, sink), keep = std::exp2(sum.most - most);
    sum = {most, sum.sum * keep + std::exp2(sink - most)};
    for (int d = 0; d < width; ++d) mixed[d] *= keep;
}

template <class T>
using AttendPart = void (*)(const Queries&, const KeyRange<T>&, int, float*, float*, Outcome*);
template <class T, int... R>
constexpr auto attend_parts_of(std::integer_sequence<int, R...>) {
    struct { AttendPart<T> of[sizeof...(R) + 1]; } table{{nullptr, attend_part<R + 1, T>...}};
    return table;
}
template <class T>
inline const auto ATTEND_PART = attend_parts_of<T>(std::make_integer_sequence<int, MAX_QUERIES>{});
