// Attention over keys and values that lie in blocks of BLOCK tokens, read where they are.
//
// Knows no layers, no threads and no requests.  A tile is a few rows of one sequence times the query heads that share
// one key head, so that this is read once for all of them.  The one idea: a row's numbers depend on the row alone.
// The tokens it sees are cut into parts of PART by their position; a part's scores, its largest, its sum and its mixed
// values are made in one order, and parts are merged in order, whoever computed them and with whom.
//
// Layouts of one head in one block, D the head's width padded to a multiple of 32:
//   keys    [D / 2][16 tokens][2] as bf16, [D][16 tokens] as float
//   values  [16 tokens][D / 32][16][2] as bf16 (features d and d + 16 side by side), [16 tokens][D] as float
// so that a register of either is one load: no shuffles, no sums over lanes.
#pragma once

#include <algorithm>

#include "vectors.hpp"

constexpr int BLOCK = 16;   // tokens
constexpr int PART = 256;   // tokens
constexpr int PART_BLOCKS = PART / BLOCK;
constexpr int MOST_QUERIES = LANES == 16 ? 12 : 4;  // of a tile: rows times heads

INLINE void key_pair(const float* block, int d, int token, Floats& even, Floats& odd) {
    load_pairs(block + d * BLOCK + token, BLOCK, even, odd);
}
INLINE void key_pair(const bf16* block, int d, int token, Floats& even, Floats& odd) {
    load_pairs(block + d * BLOCK + 2 * token, even, odd);
}
INLINE void value_pair(const float* token, int d, int lane, Floats& low, Floats& high) {
    load_pairs(token + d + lane, 16, low, high);
}
INLINE void value_pair(const bf16* token, int d, int lane, Floats& low, Floats& high) {
    load_pairs(token + d + 2 * lane, low, high);
}

// One token's key and value of one head into its block.
inline void store_head(float* keys, float* values, int token, const float* key, const float* value, int width, int padded) {
    for (int d = 0; d < width; ++d) keys[d * BLOCK + token] = key[d];
    memcpy(values + token * padded, value, size_t(width) * sizeof(float));
}
inline void store_head(bf16* keys, bf16* values, int token, const float* key, const float* value, int width, int padded) {
    bf16* out = values + token * padded;
    for (int start = 0; start < padded; start += 32) {
        const int count = std::min(32, width - start);
        bf16 k[32] = {}, v[32] = {};
        for (int d = 0; d < count; ++d) k[d] = narrow(key[start + d]);
        for (int d = 0; d < count; ++d) v[d] = narrow(value[start + d]);
        for (int d = 0; d < 32; d += 2) memcpy(keys + (start + d) * BLOCK + 2 * token, k + d, 2 * sizeof(bf16));
        for (int d = 0; d < 16; ++d) {
            out[start + 2 * d] = v[d];
            out[start + 2 * d + 1] = v[16 + d];
        }
    }
}

// What R queries look at: tokens [from[r], to[r]) of a sequence whose blocks are keys[b] and values[b].  AHEAD pointers
// follow the last, to somewhere that may be fetched in vain.
constexpr int AHEAD = 8;
template <class T>
struct Sight {
    const T* const* keys;
    const T* const* values;
    int width;  // D, padded
    int from[MOST_QUERIES], to[MOST_QUERIES];
};

// A part's outcome for one query: mixed values are not divided by the sum yet.
struct Outcome {
    float most, sum;
};

// Hardware does not look ahead from block to block: a line of what is read next, for each line that is read.
template <class T>
INLINE void prefetch_line(const T* block, int d) {
    __builtin_prefetch(block + d * BLOCK, 0, 3);
    if constexpr (sizeof(T) == 4) __builtin_prefetch(block + d * BLOCK + BLOCK, 0, 3);
}

template <int R, int B, class T>
INLINE void score_blocks(const float* q, const T* const* blocks, const T* const* values, int width, float* scores) {
    for (int token = 0; token < BLOCK; token += LANES) {
        Floats a[R][B];
        UNROLL(R, r, UNROLL(B, b, a[r][b] = zero()));
        for (int d = 0; d < width; d += 2) {
            Floats even[B], odd[B];
            UNROLL(B, b, key_pair(blocks[b], d, token, even[b], odd[b]));
            if constexpr (R <= 4) { UNROLL(B, b, prefetch_line(values[b], d); prefetch_line(blocks[b + B], d)); }
            UNROLL(R, r, Floats q0 = all(q[r * width + d]); UNROLL(B, b, a[r][b] = fma(even[b], q0, a[r][b]));
                Floats q1 = all(q[r * width + d + 1]); UNROLL(B, b, a[r][b] = fma(odd[b], q1, a[r][b])));
        }
        UNROLL(R, r, UNROLL(B, b, store(scores + r * PART + b * BLOCK + token, a[r][b])));
    }
}

// Scores [.., PART) of one query to e^(score - most) where it looks, zeros elsewhere.
INLINE Outcome soften(float* scores, int from, int to, int end) {
    Floats top = all(-INFINITY);
    const int begin = from / LANES * LANES;
    auto seen = [&](int i, Floats v) __attribute__((always_inline)) {
        if (i + LANES > to) v = first(v, to - i, -INFINITY);
        return i < from ? past(v, from - i, -INFINITY) : v;
    };
    for (int i = begin; i < to; i += LANES) top = largest(top, seen(i, load(scores + i)));
    const float most = highest(top);
    Floats s = zero();
    for (int i = 0; i < begin; i += LANES) store(scores + i, zero());
    for (int i = begin; i < to; i += LANES) {
        Floats v = load(scores + i), e = exponential(sub(v, all(most)));
        if (i + LANES > to) e = first(e, to - i, 0.f);
        if (i < from) e = past(e, from - i, 0.f);
        s = add(s, e);
        store(scores + i, e);
    }
    for (int i = (to + LANES - 1) / LANES * LANES; i < end; i += LANES) store(scores + i, zero());
    return {most, sum(s)};
}

template <int R, int Z, class T>
INLINE void mix_values(const float* scores, const T* const* blocks, int from, int to, int width, int d, float* out) {
    for (int lane = 0; lane < 16; lane += LANES) {
        Floats a[R][2 * Z];
        UNROLL(R, r, UNROLL(2 * Z, z, a[r][z] = zero()));
        for (int i = from; i < to; ++i) {
            const T* token = blocks[i / BLOCK] + i % BLOCK * width;
            Floats v[2 * Z];
            UNROLL(Z, z, value_pair(token, d + 32 * z, lane, v[2 * z], v[2 * z + 1]));
            UNROLL(R, r, Floats p = all(scores[r * PART + i]); UNROLL(2 * Z, z, a[r][z] = fma(v[z], p, a[r][z])));
        }
        UNROLL(R, r, UNROLL(2 * Z, z, store(out + r * width + d + 16 * z + lane, a[r][z])));
    }
}

// One part of what R queries [R][D] look at: into mixed [R][D] and outcomes [R].  `scores` has room for [R][PART].
template <int R, class T>
void attend_part(const float* q, const Sight<T>& sight, int part, float* scores, float* mixed, Outcome* outcomes) {
    constexpr int B = R * 4 * (BLOCK / LANES) <= 12 ? 4 : R * 2 * (BLOCK / LANES) <= 12 ? 2 : 1;
    const int start = part * PART;
    int low = PART, high = 0, from[R], to[R];
    for (int r = 0; r < R; ++r) {
        from[r] = std::clamp(sight.from[r] - start, 0, PART);
        to[r] = std::clamp(sight.to[r] - start, 0, PART);
        if (from[r] < to[r]) { low = std::min(low, from[r]); high = std::max(high, to[r]); }
    }
    const T* const* keys = sight.keys + part * PART_BLOCKS;
    const T* const* values = sight.values + part * PART_BLOCKS;
    const int width = sight.width, last = (high + BLOCK - 1) / BLOCK;
    int b = low / BLOCK;
    for (; b + B <= last; b += B) score_blocks<R, B>(q, keys + b, values + b, width, scores + b * BLOCK);
    if constexpr (B > 1) for (; b < last; ++b) score_blocks<R, 1>(q, keys + b, values + b, width, scores + b * BLOCK);
    for (int r = 0; r < R; ++r) {
        if (from[r] < to[r]) { outcomes[r] = soften(scores + r * PART, from[r], to[r], last * BLOCK); continue; }
        outcomes[r] = {-INFINITY, 0.f};  // it sees nothing of this part
        for (int i = 0; i < last * BLOCK; ++i) scores[r * PART + i] = 0.f;
    }
    int d = 0;
    if constexpr (R <= 4 && LANES == 16)
        for (; d + 64 <= width; d += 64) mix_values<R, 2>(scores, values, low, high, width, d, mixed);
    for (; d < width; d += 32) mix_values<R, 1>(scores, values, low, high, width, d, mixed);
}

// What came before and one part more; [D] values each.
inline void merge(Outcome& sum, float* mixed, const Outcome& part, const float* more, int width) {
    if (part.most == -INFINITY && part.sum == 0.f) return;
    const float most = std::max(sum.most, part.most);
    const float keep = sum.sum == 0.f && sum.most == -INFINITY ? 0.f : std::exp(sum.most - most);
    const float take = std::exp(part.most - most);
    sum = {most, sum.sum * keep + part.sum * take};
    for (int d = 0; d < width; d += LANES)
        store(mixed + d, fma(load(more + d), all(take), mul(load(mixed + d), all(keep))));
}

template <class T>
using AttendPart = void (*)(const float*, const Sight<T>&, int, float*, float*, Outcome*);
template <class T, int... R>
constexpr auto attend_parts_of(std::integer_sequence<int, R...>) {
    struct { AttendPart<T> of[sizeof...(R) + 1]; } table{{nullptr, attend_part<R + 1, T>...}};
    return table;
}
template <class T>
inline const auto ATTEND_PART = attend_parts_of<T>(std::make_integer_sequence<int, MOST_QUERIES>{});
