// x [M, K] times packed weights [K, N]: float32, and weights of 8 and 4 bits.
//
// The caller chooses the rows and the blocks of COLUMNS outputs.  A row's result is computed by the same operations in the
// same order however many rows are computed beside it, so it does not depend on the batch.
//
// Narrow weights keep the codes and scales of their file: GROUP inputs of an output share a scale, as in GGUF's blocks.
// The inputs of a row are rounded to 8 bits in spans of SPAN, each with a scale of its own.  Sums within a span are exact
// integers; spans and groups are added in order as floats.  In INT8_WIDE groups and spans are of WIDE inputs: 18 operations
// take the place of 22 for 16 outputs of 64 inputs.  docs/log.md compares the sizes of groups and spans.
//
// Layouts, written by pack.hpp; a block is COLUMNS outputs, in two halves of HALF:
//   float32  [N / 32][K][32] floats
//   int8     [N / 32][K / 32] of {[8][32][4] bytes, each a weight + 128; scales [32] in half precision}
//   wide     [N / 32][K / 64] of {[16][32][4] bytes, each a weight + 128; scales [32] in half precision}
//   4-bit    [N / 32][K / 32] of {[4][32][4] bytes, low bits inputs 8u .. 8u + 3, high bits 8u + 4 .. 8u + 7, each a
//            weight + 8; scales [32] in half precision}, as GGUF's Q4_0
//   shifted  of 4 bits or 8: the same, but nothing is added to codes, which stand above the group's least weight; behind
//            the scales the least weights [32] in half precision, as GGUF's Q4_1, Q4_K, Q5_1 and Q5_K
#pragma once

#include "vectors.hpp"

constexpr int COLUMNS = 32, HALF = 16;
constexpr int PADDING = 64;       // the length of a row, padded with zeros, is a multiple of it
constexpr int GROUP = 32;         // inputs whose weights share a scale, of one output
constexpr int SPAN = 16;          // inputs of a row that share a scale
constexpr int WIDE = 64;          // inputs of a group and of a span in INT8_WIDE; a row's length is a multiple
constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 4;   // of a tile: what the registers hold
constexpr int NARROW_ROWS = LANES == 16 ? 6 : 4;  // of a tile of narrow weights, which has two more sums a row

enum Format : int32_t { FLOAT32 = 0, INT8 = 1, INT4 = 2, INT4_SHIFTED = 3, INT8_SHIFTED = 4, INT8_WIDE = 5 };
enum Activation : int32_t { GELU = 0, GELU_TANH = 1, SILU = 2, RELU = 3, RELU_SQUARED = 4, GELU_SIGMOID = 5, CLAMPED = 6 };
enum Then : int32_t { STORE, ADD, ACTIVATE, GATE };  // what is done with the product

struct Linear {
    const uint8_t* weights;
    const float* bias;  // [N], or null
    int32_t inputs;     // K, a multiple of PADDING
    int32_t outputs;    // N, a multiple of COLUMNS
    int32_t format;
    float unit;         // of the scales, a power of two: INT8 and INT8_WIDE only
};

// The update that an adapter adds to a product: B (A x), with the scale in B (models/network/lora.py).  If several matrices
// are packed as one, their A matrices are stacked; for B, each half of a block stores its own columns.
struct LowRank {
    struct Half {
        const float* b;  // [rank][HALF]
        int32_t from, rank;  // the range of rows of A that it uses
    };
    const float* a;      // [R][K]
    const float* b;      // of all halves
    const Half* halves;  // [N / HALF]
    int32_t rank;        // R; 0: nothing is added
    int32_t a_bytes, b_bytes;
    int32_t unused;
};

// Rows to be multiplied: as floats, or as bytes with a scale a SPAN.
struct Operand {
    float* floats;   // [M, K]
    int8_t* codes;   // [M, K]
    float* scales;   // [M, K / span_inputs(format)]
    float* offsets;  // [M, K / group_inputs(format)] sums of the rounded inputs times offset_of(format)
    int inputs;      // K
    float* low = nullptr;                   // [M, stride] A x of those rows that have an adapter
    int stride = 0;
    const LowRank* const* adapters = nullptr;  // [M] the adapter of row r; its update of this product is adapters[r][which]
    int which = 0;
};

struct Target {
    float* out;  // [M, stride]; GATE writes half as many columns as there are outputs
    int stride;
    Then then;
    int activation;
    float scale = 1.f;  // of what ADD adds
    float limit = 0.f;  // CLAMPED only: of inner features
};

INLINE Floats activated(int kind, Floats x, float limit) {
    switch (kind) {
        case GELU: return gelu(x);
        case GELU_TANH: return gelu_tanh(x);
        case SILU: return silu(x);
        case RELU: return relu(x);
        case RELU_SQUARED: return relu_squared(x);
        case CLAMPED: return gelu_sigmoid(least(all(limit), x));
        default: return gelu_sigmoid(x);
    }
}

// What the gate is multiplied by (ClampedMLP in models/network/mlp.py).
INLINE Floats gated_values(int kind, Floats x, float limit) {
    return kind == CLAMPED ? add(least(all(limit), largest(all(-limit), x)), all(1.f)) : x;
}

constexpr bool is_8_bit(int format) { return format == INT8 || format == INT8_SHIFTED || format == INT8_WIDE; }
constexpr bool is_shifted(int format) { return format == INT4_SHIFTED || format == INT8_SHIFTED; }
// Inputs whose weights share a scale, of one output, and inputs of a row that do.
constexpr int group_inputs(int format) { return format == INT8_WIDE ? WIDE : GROUP; }
constexpr int span_inputs(int format) { return format == INT8_WIDE ? WIDE : SPAN; }
// Bytes of a group's COLUMNS: codes, and all.
constexpr int code_bytes(int format) { return is_8_bit(format) ? group_inputs(format) * COLUMNS : GROUP * COLUMNS / 2; }
constexpr int group_bytes(int format) { return code_bytes(format) + (is_shifted(format) ? 4 : 2) * COLUMNS; }

INLINE size_t block_bytes(const Linear& l) {
    size_t k = size_t(l.inputs);
    switch (l.format) {
        case FLOAT32: return k * COLUMNS * 4;
        default: return k / group_inputs(l.format) * group_bytes(l.format);
    }
}

// The weights [K] of output `n`, for a matrix that also is the embedding table.  FLOAT32 and INT8 only.
inline void weights_of(const Linear& l, int n, float* out) {
    const size_t block = n / COLUMNS, column = n % COLUMNS;
    if (l.format == FLOAT32) {
        const float* w = (const float*)l.weights + block * l.inputs * COLUMNS + column;
        for (int k = 0; k < l.inputs; ++k) out[k] = w[size_t(k) * COLUMNS];
        return;
    }
    const uint8_t* w = l.weights + block * block_bytes(l);
    for (int g = 0; g < l.inputs / GROUP; ++g, w += group_bytes(INT8)) {
        const float scale = widen_half(((const fp16*)(w + code_bytes(INT8)))[column]) * l.unit;
        for (int i = 0; i < GROUP; ++i) *out++ = float(w[(i / 4 * COLUMNS + column) * 4 + i % 4] - 128) * scale;
    }
}

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
INLINE void prefetch_later(const void* p) { __builtin_prefetch(p, 0, 2); }

// What is read after a tile.  Each tile prefetches its share of it into the second-level cache, evenly: too many requests
// at once would make all of them wait.
struct Ahead {
    const uint8_t* at;
    int bytes;  // for each step of the tile: an input of FLOAT32, otherwise a span; 0: nothing
    INLINE void step() {
        for (int i = 0; i < bytes; i += 64) prefetch_later(at + i);
        at += bytes;
    }
};

// Rows r of a tile are at p[r / 3] + r % 3 * K: three to a pointer, so that addresses need few registers.
template <int R, class T>
struct Cursor {
    const T* p[(R + 2) / 3];
    size_t k;
    INLINE Cursor(const T* x, int inputs) : k(size_t(inputs)) { UNROLL((R + 2) / 3, i, p[i] = x + 3 * i * k); }
    INLINE const T* row(int r) const { return p[r / 3] + (r % 3) * k; }
    INLINE void advance(int n) { UNROLL((R + 2) / 3, i, p[i] += n); }
};

// The product of R rows and LANES columns of each half of a block; `lane` is the first of them.
template <int R>
INLINE void multiply_floats(const Linear& l, const uint8_t* block, int lane, const float* x, Floats (&f)[R][2],
                            Ahead ahead) {
    const float* w = (const float*)block + lane;
    Cursor<R, float> at(x, l.inputs);
    for (int k = 0; k < l.inputs; ++k, w += COLUMNS) {
        Floats w0 = load(w), w1 = load(w + HALF);
        if constexpr (R == 1) { prefetch(w + 512); prefetch(w + 512 + HALF); }
        else ahead.step();
        UNROLL(R, r, Floats b = all(*at.row(r)); f[r][0] = fma(w0, b, f[r][0]); f[r][1] = fma(w1, b, f[r][1]));
        at.advance(1);
    }
}

// The codes of four inputs, `u` of four in a span of a group, of LANES outputs.
template <int FORMAT>
INLINE Ints load_weights(const uint8_t* group, int span, int u, int column) {
    if constexpr (is_8_bit(FORMAT)) return load_codes(group + (span_inputs(FORMAT) / 4 * span + u) * 128 + 4 * column);
    const Ints both = load_codes(group + (2 * span + u / 2) * 128 + 4 * column);
    return u % 2 ? high_codes(both) : low_codes(both);
}

template <int R, int FORMAT>
INLINE void multiply_narrow(const Linear& l, const uint8_t* w, int lane, const Operand& x, int row, Floats (&f)[R][2],
                            Ahead ahead) {
    constexpr int BYTES = group_bytes(FORMAT), SPANS = group_inputs(FORMAT) / span_inputs(FORMAT);
    constexpr int PRODUCTS = span_inputs(FORMAT) / 4;
    constexpr int CHAINS = REGISTERS < 32 || R > 3 ? 1 : R == 1 ? 4 : 2;  // of sums, since a product takes several cycles
    const int groups = l.inputs / group_inputs(FORMAT);
    const float* scales = x.scales + size_t(row) * SPANS * groups;
    const float* offsets = x.offsets + size_t(row) * groups;
    Cursor<R, int8_t> at(x.codes + size_t(row) * l.inputs, l.inputs);
    for (int g = 0; g < groups; ++g, w += BYTES) {
        Floats t[R][2];  // the group's product, in scales of the weights
        if constexpr (R == 1) { UNROLL(BYTES / 64, i, prefetch(w + 2304 + 64 * i)); }
        UNROLL(SPANS, span,
            Ints a[CHAINS][R][2];
            UNROLL(CHAINS, c, UNROLL(R, r, a[c][r][0] = a[c][r][1] = all_ints(0)));
            const auto multiply = [&](auto u, auto c) INLINED {
                if constexpr (R > 1) { if (u % 4 == 0) ahead.step(); }
                Ints w0 = load_weights<FORMAT>(w, span, u, lane), w1 = load_weights<FORMAT>(w, span, u, lane + HALF);
                UNROLL(R, r, Four b = four(at.row(r) + 4 * u);
                    a[c][r][0] = dot(a[c][r][0], w0, b); a[c][r][1] = dot(a[c][r][1], w1, b));
            };
            if constexpr (FUSED_DOT) { UNROLL(PRODUCTS, u, multiply(u, std::integral_constant<int, u % CHAINS>{})); }
            else { NOT_UNROLLED for (int u = 0; u < PRODUCTS; ++u) multiply(u, 0); }
            at.advance(span_inputs(FORMAT));
            UNROLL(R, r, Floats s = all(scales[size_t(r) * SPANS * groups + SPANS * g + span]); UNROLL(2, h,
                Ints sum = a[0][r][h];
                UNROLL(CHAINS - 1, c, sum = add_ints(sum, a[c + 1][r][h]));
                if constexpr (span == 1) t[r][h] = fma(to_floats(sum), s, t[r][h]);
                else if constexpr (is_shifted(FORMAT)) t[r][h] = mul(to_floats(sum), s);
                else t[r][h] = fma(to_floats(sum), s, all(offsets[size_t(r) * groups + g])))));
        const fp16* halves = (const fp16*)(w + code_bytes(FORMAT)) + lane;
        Floats s0 = load_halves(halves); Floats s1 = load_halves(halves + HALF);
        UNROLL(R, r, f[r][0] = fma(t[r][0], s0, f[r][0]); f[r][1] = fma(t[r][1], s1, f[r][1]));
        if constexpr (is_shifted(FORMAT)) {
            Floats m0 = load_halves(halves + COLUMNS); Floats m1 = load_halves(halves + COLUMNS + HALF);
            UNROLL(R, r, Floats sum = all(offsets[size_t(r) * groups + g]);
                f[r][0] = fma(m0, sum, f[r][0]); f[r][1] = fma(m1, sum, f[r][1]));
        }
    }
}

// A x for R rows, with N rows of A at a time.  Each sum is computed alone, whatever is computed beside it.
template <int R, int N>
INLINE void project_low(const LowRank& l, int k, const float* const* rows, int inputs, float* low, int stride) {
    const float* a = l.a + size_t(k) * inputs;
    Floats f[R][N];
    UNROLL(R, r, UNROLL(N, n, f[r][n] = zero()));
    for (int i = 0; i < inputs; i += LANES) {
        Floats v[R];
        UNROLL(R, r, v[r] = load(rows[r] + i));
        UNROLL(N, n, Floats w = load(a + size_t(n) * inputs + i); UNROLL(R, r, f[r][n] = fma(w, v[r], f[r][n])));
    }
    UNROLL(R, r, float* out = low + size_t(r) * stride + k;
        if constexpr (N == 4) store_sums(out, f[r][0], f[r][1], f[r][2], f[r][3]);
        else out[0] = sum(f[r][0]));
}

template <int R>
void project_low(const LowRank& l, const float* const* rows, int inputs, float* low, int stride) {
    int k = 0;
    for (; k + 4 <= l.rank; k += 4) project_low<R, 4>(l, k, rows, inputs, low, stride);
    for (; k < l.rank; ++k) project_low<R, 1>(l, k, rows, inputs, low, stride);
}

INLINE void prefetch_all(const void* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

// A x for rows [a, b) of x, whose floats are at rows[a .. b); neighbouring rows with the same adapter are computed a few at
// a time.  `next`: there is a product after this one.  What it and this one read of an adapter is prefetched meanwhile.
inline void project_low(const Operand& x, const float* const* rows, int a, int b, bool next) {
    constexpr int FEW = REGISTERS == 32 ? 4 : 2;  // what the registers hold
    const LowRank* before = nullptr;
    while (a < b) {
        int end = a + 1;
        while (end < b && end < a + FEW && x.adapters[end] == x.adapters[a]) ++end;
        if (const LowRank* l = x.adapters[a]) {
            l += x.which;
            if (l != before) {
                prefetch_all(l->b, l->b_bytes);
                if (next) prefetch_all(l[1].a, l[1].a_bytes);
                before = l;
            }
            float* low = x.low + size_t(a) * x.stride;
            if (!l->rank) {}
            else if (end - a == FEW) project_low<FEW>(*l, rows + a, x.inputs, low, x.stride);
            else for (int r = a; r < end; ++r)
                project_low<1>(*l, rows + r, x.inputs, low + size_t(r - a) * x.stride, x.stride);
        }
        a = end;
    }
}

// Adds the adapters' updates to R rows of a tile, in one order for each row.
template <int R>
INLINE void add_adapters(const Operand& x, int row, int block, int lane, Floats (&f)[R][2]) {
    const LowRank* const* adapters = x.adapters + row;
    const float* low = x.low + size_t(row) * x.stride;
    bool alike = true;
    for (int r = 1; r < R; ++r) alike &= adapters[r] == adapters[0];
    if (alike) {
        if (!adapters[0] || !adapters[0][x.which].rank) return;
        UNROLL(2, h, const LowRank::Half& half = adapters[0][x.which].halves[2 * block + h];
            for (int k = 0; k < half.rank; ++k) {
                Floats b = load(half.b + size_t(k) * HALF + lane);
                UNROLL(R, r, f[r][h] = fma(b, all(low[size_t(r) * x.stride + half.from + k]), f[r][h]));
            });
        return;
    }
    UNROLL(R, r, if (adapters[r] && adapters[r][x.which].rank) {
        UNROLL(2, h, const LowRank::Half& half = adapters[r][x.which].halves[2 * block + h];
            for (int k = 0; k < half.rank; ++k)
                f[r][h] = fma(load(half.b + size_t(k) * HALF + lane), all(low[size_t(r) * x.stride + half.from + k]),
                              f[r][h]));
    });
}

// Completes a product: unit, bias, adapters' updates, then the activation, the gate or the addition to the target.
template <int R>
INLINE void finish(const Linear& l, const Operand& x, int block, int lane, Floats (&f)[R][2], const Target& to, int row) {
    const int column = block * COLUMNS + lane;
    if (l.format == INT8 || l.format == INT8_WIDE) {
        Floats unit = all(l.unit);
        UNROLL(R, r, f[r][0] = mul(f[r][0], unit); f[r][1] = mul(f[r][1], unit));
    }
    if (l.bias) {
        Floats b0 = load(l.bias + column), b1 = load(l.bias + column + HALF);
        UNROLL(R, r, f[r][0] = add(f[r][0], b0); f[r][1] = add(f[r][1], b1));
    }
    if (x.adapters) add_adapters<R>(x, row, block, lane, f);
    if (to.then == GATE) {  // the first half is the gate, the second the gated values
        float* out = to.out + size_t(row) * to.stride + block * HALF + lane;
        UNROLL(R, r, store(out + size_t(r) * to.stride, mul(activated(to.activation, f[r][0], to.limit),
                                                            gated_values(to.activation, f[r][1], to.limit))));
        return;
    }
    float* out = to.out + size_t(row) * to.stride + column;
    if (to.then == ADD) {
        if (to.scale != 1.f) {
            const Floats scale = all(to.scale);
            UNROLL(R, r, f[r][0] = mul(f[r][0], scale); f[r][1] = mul(f[r][1], scale));
        }
        UNROLL(R, r, const float* old = out + size_t(r) * to.stride;
            f[r][0] = add(load(old), f[r][0]); f[r][1] = add(load(old + HALF), f[r][1]));
    } else if (to.then == ACTIVATE) {
        UNROLL(R, r, UNROLL(2, h, f[r][h] = activated(to.activation, f[r][h], to.limit)));
    }
    UNROLL(R, r, store(out + size_t(r) * to.stride, f[r][0]); store(out + size_t(r) * to.stride + HALF, f[r][1]));
}

template <int R>
void tile(const Linear& l, int block, const Operand& x, int row, const Target& to, Ahead ahead) {
    const uint8_t* w = l.weights + block * block_bytes(l);
    for (int lane = 0; lane < HALF; lane += LANES) {
        Floats f[R][2];
        UNROLL(R, r, f[r][0] = f[r][1] = zero());
        if (l.format == FLOAT32) multiply_floats<R>(l, w, lane, x.floats + size_t(row) * l.inputs, f, ahead);
        else if constexpr (R <= NARROW_ROWS) {
            if (l.format == INT8) multiply_narrow<R, INT8>(l, w, lane, x, row, f, ahead);
            else if (l.format == INT8_WIDE) multiply_narrow<R, INT8_WIDE>(l, w, lane, x, row, f, ahead);
            else if (l.format == INT4) multiply_narrow<R, INT4>(l, w, lane, x, row, f, ahead);
            else if (l.format == INT4_SHIFTED) multiply_narrow<R, INT4_SHIFTED>(l, w, lane, x, row, f, ahead);
            else multiply_narrow<R, INT8_SHIFTED>(l, w, lane, x, row, f, ahead);
        }
        finish<R>(l, x, block, lane, f, to, row);
        ahead = {w, 0};
    }
}

using Tile = void (*)(const Linear&, int, const Operand&, int, const Target&, Ahead);
template <int... R>
constexpr auto tiles_of(std::integer_sequence<int, R...>) {
    struct { Tile of[sizeof...(R) + 1]; } table{{nullptr, tile<R + 1>...}};
    return table;
}
inline const auto TILES = tiles_of(std::make_integer_sequence<int, MAX_ROWS>{});

// Rows [0, rows) of x, blocks [from, to_block) of the outputs; `after` is what is read next.
inline void gemm(const Linear& l, const Operand& x, int rows, int from, int to_block, const Target& to,
                 const uint8_t* after = nullptr) {
    if (!rows) return;
    const int most = l.format == FLOAT32 ? MAX_ROWS : NARROW_ROWS;
    const int tiles = (rows + most - 1) / most;
    const int steps = l.format == FLOAT32 ? l.inputs : l.inputs / SPAN;
    const int bytes = (int(block_bytes(l)) / steps + tiles - 1) / tiles;  // ahead in each step
    for (int block = from; block < to_block; ++block) {
        const uint8_t* next = block + 1 < to_block ? l.weights + (block + 1) * block_bytes(l) : after;
        for (int t = 0, row = 0; t < tiles; ++t) {
            const int count = rows / tiles + (t < rows % tiles);
            TILES.of[count](l, block, x, row, to,
                next ? Ahead{next + size_t(t) * steps * bytes, bytes} : Ahead{l.weights, 0});
            row += count;
        }
    }
    if (rows == 1 && after)  // a single row is limited by memory: prefetch what is read next
        for (int i = 0; i < 16384; i += 64) prefetch_later(after + i);
}
