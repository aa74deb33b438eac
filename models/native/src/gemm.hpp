// x [M, K] times packed weights [K, N]: float32, int8 and 4-bit weights.
//
// Knows neither layers nor threads: whoever calls says which rows and which blocks of COLUMNS outputs.  The one idea: a
// row's result is made by the same operations in the same order however many rows are computed beside it, so it does
// not depend on the batch.  Integers are added exactly within a group of the inputs, and groups are added in order.
//
// Layouts, written by pack.py; a block is COLUMNS outputs, in two halves of HALF:
//   float32  [N / 32][K][32] floats
//   int8     [N / 32][K / 4][32][4] bytes, each a weight + 128; `scales` [N]
//   4-bit    [N / 32][K / 32] of {[4][32][4] bytes, low bits inputs 8u .. 8u + 3, high bits 8u + 4 .. 8u + 7, each a
//            weight + 8; scales [32] in half precision}, as GGUF's Q4_0
//   shifted  the same, each code standing for so many scales above the group's least weight: {[4][32][4] bytes, scales
//            [32], least weights [32] in half precision}, as GGUF's Q4_1
#pragma once

#include "vectors.hpp"

constexpr int COLUMNS = 32, HALF = 16;
constexpr int GROUP = 64;         // inputs of a row that share a scale
constexpr int FINE = 32;          // inputs of an output that share a scale, 4-bit
constexpr int FINE_BYTES = 512 + 64, SHIFTED_BYTES = FINE_BYTES + 64;
constexpr int MOST_ROWS = LANES == 16 ? 12 : 4;  // of a tile: what the registers hold

enum Format : int32_t { FLOAT32 = 0, INT8 = 1, INT4 = 2, SHIFTED = 3 };
enum Activation : int32_t { GELU = 0, GELU_TANH = 1, SILU = 2, RELU = 3 };
enum Then : int32_t { STORE, ADD, ACTIVATE, GATE };  // what is done with a product

struct Linear {
    const uint8_t* weights;
    const float* scales;
    const float* bias;  // [N], or null
    int32_t inputs;     // K, a multiple of GROUP
    int32_t outputs;    // N, a multiple of COLUMNS
    int32_t format;
    int32_t unused;
};

// What an adapter adds to a product's outputs: B (A x), the scale in B (models/lora.py).  Several matrices packed as one
// have their A's one below the other; of B, each half of a block has the columns that are its own.
struct LowRank {
    struct Half {
        const float* b;  // [rank][HALF]
        int32_t from, rank;  // of the rows of A those that it mixes
    };
    const float* a;      // [R][K]
    const float* b;      // of all halves
    const Half* halves;  // [N / HALF]
    int32_t rank;        // R; 0: nothing is added
    int32_t a_bytes, b_bytes;
    int32_t unused;
};

// Rows to be multiplied: as floats, or as bytes with a scale a GROUP.
struct Operand {
    float* floats;   // [M, K]
    int8_t* codes;   // [M, K]
    float* scales;   // [M, K / GROUP]
    int32_t* sums;   // [M, K / FINE] of the codes; where weights have 128 added, [M, K / GROUP] -128 times
    int inputs;      // K
    float* low = nullptr;                   // [M, stride] A x of those rows that have an adapter
    int stride = 0;
    const LowRank* const* who = nullptr;    // [M] what row r has, for all products: this one's is who[r][which]
    int which = 0;
};

struct Target {
    float* out;  // [M, stride]; GATE writes half as many columns as there are outputs
    int stride;
    Then then;
    int activation;
};

INLINE Floats activated(int kind, Floats x) {
    switch (kind) {
        case GELU: return gelu(x);
        case GELU_TANH: return gelu_tanh(x);
        case SILU: return silu(x);
        default: return relu(x);
    }
}

INLINE size_t block_bytes(const Linear& l) {
    size_t k = size_t(l.inputs);
    switch (l.format) {
        case FLOAT32: return k * COLUMNS * 4;
        case INT8: return k * COLUMNS;
        default: return k / FINE * (l.format == INT4 ? FINE_BYTES : SHIFTED_BYTES);
    }
}

// What output `n` weighs its inputs with, [K]: where the matrix has the embeddings of tokens too.  Not of 4-bit weights.
inline void weights_of(const Linear& l, int n, float* out) {
    const size_t block = n / COLUMNS, column = n % COLUMNS;
    if (l.format == FLOAT32) {
        const float* w = (const float*)l.weights + block * l.inputs * COLUMNS + column;
        for (int k = 0; k < l.inputs; ++k) out[k] = w[size_t(k) * COLUMNS];
        return;
    }
    const uint8_t* w = l.weights + block * l.inputs * COLUMNS + column * 4;
    for (int k = 0; k < l.inputs; ++k) out[k] = float(w[k / 4 * COLUMNS * 4 + k % 4] - 128) * l.scales[n];
}

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
INLINE void prefetch_later(const void* p) { __builtin_prefetch(p, 0, 2); }

// What is read after a tile, of which it brings its share into the second-level cache, evenly: memory that is asked for
// everything at once makes all wait.
struct Ahead {
    const uint8_t* at;
    int bytes;  // for each step of the tile, at most 128; 0: nothing, again and again
    INLINE void step() {
        prefetch_later(at);
        if (bytes > 64) prefetch_later(at + 64);
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

template <int R>
INLINE void multiply_int8(const Linear& l, const uint8_t* w, int lane, const Operand& x, int row, Floats (&f)[R][2],
                          Ahead ahead) {
    const int groups = l.inputs / GROUP;
    const float* scales = x.scales + size_t(row) * groups;
    const int32_t* sums = x.sums + size_t(row) * groups;
    Cursor<R, int8_t> at(x.codes + size_t(row) * l.inputs, l.inputs);
    w += lane * 4;
    for (int g = 0; g < groups; ++g) {
        Ints a[R][2];
        UNROLL(R, r, a[r][0] = a[r][1] = all_ints(sums[size_t(r) * groups + g]));
        if constexpr (R == 1) {  // four chains a column instead of one: a product takes several cycles
            Ints b[3][2];
            UNROLL(3, i, b[i][0] = b[i][1] = all_ints(0));
            for (int k = 0; k < GROUP; k += 16, w += 512) {
                UNROLL(4, u, Four four_x = four(at.row(0) + k + 4 * u);
                    prefetch(w + 2048 + 128 * u); prefetch(w + 2048 + 128 * u + 64);
                    UNROLL(2, h, Ints codes = load_codes(w + 128 * u + 64 * h);
                        if constexpr (decltype(u)::value == 0) a[0][h] = dot(a[0][h], codes, four_x);
                        else b[u - 1][h] = dot(b[u - 1][h], codes, four_x)));
            }
            UNROLL(2, h, a[0][h] = add_ints(add_ints(a[0][h], b[0][h]), add_ints(b[1][h], b[2][h])));
            at.advance(GROUP);
        } else {
            for (int k = 0; k < GROUP; k += 4, w += 128) {
                Ints w0 = load_codes(w), w1 = load_codes(w + 64);
                ahead.step();
                UNROLL(R, r, Four b = four(at.row(r)); a[r][0] = dot(a[r][0], w0, b); a[r][1] = dot(a[r][1], w1, b));
                at.advance(4);
            }
        }
        UNROLL(R, r, Floats s = all(scales[size_t(r) * groups + g]);
            f[r][0] = fma(to_floats(a[r][0]), s, f[r][0]); f[r][1] = fma(to_floats(a[r][1]), s, f[r][1]));
    }
}

template <int R, bool shifted>
INLINE void multiply_int4(const Linear& l, const uint8_t* w, int lane, const Operand& x, int row, Floats (&f)[R][2],
                          Ahead ahead) {
    constexpr int bytes = shifted ? SHIFTED_BYTES : FINE_BYTES;
    const int groups = l.inputs / FINE;
    const float* scales = x.scales + size_t(row) * (groups / 2);
    const int32_t* sums = x.sums + size_t(row) * groups;
    Cursor<R, int8_t> at(x.codes + size_t(row) * l.inputs, l.inputs);
    for (int g = 0; g < groups; ++g, w += bytes) {
        Ints a[R][2];
        UNROLL(R, r, a[r][0] = a[r][1] = all_ints(shifted ? 0 : -8 * sums[size_t(r) * groups + g]));
        if constexpr (R == 1) { UNROLL(bytes / 64, i, prefetch(w + 4 * bytes + 64 * i)); }
        UNROLL(4, u, UNROLL(2, h, if constexpr (R > 1) ahead.step();
            Ints codes = load_codes(w + 128 * u + 64 * h + 4 * lane);
            Ints low = low_codes(codes); Ints high = high_codes(codes);
            UNROLL(R, r, a[r][h] = dot(a[r][h], low, four(at.row(r) + 8 * u));
                a[r][h] = dot(a[r][h], high, four(at.row(r) + 8 * u + 4)))));
        at.advance(FINE);
        const fp16* fine = (const fp16*)(w + 512) + lane;
        Floats s0 = load_halves(fine), s1 = load_halves(fine + HALF);
        UNROLL(R, r, Floats s = all(scales[size_t(r) * (groups / 2) + g / 2]);
            f[r][0] = fma(to_floats(a[r][0]), mul(s0, s), f[r][0]); f[r][1] = fma(to_floats(a[r][1]), mul(s1, s), f[r][1]));
        if constexpr (shifted) {
            Floats m0 = load_halves(fine + COLUMNS), m1 = load_halves(fine + COLUMNS + HALF);
            UNROLL(R, r, Floats s = all(scales[size_t(r) * (groups / 2) + g / 2] * float(sums[size_t(r) * groups + g]));
                f[r][0] = fma(m0, s, f[r][0]); f[r][1] = fma(m1, s, f[r][1]));
        }
    }
}

// R rows' A x, N rows of A at a time.  Each is added up alone, whatever is computed beside it.
template <int R, int N>
INLINE void lower(const LowRank& l, int k, const float* const* rows, int inputs, float* low, int stride) {
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
void lower(const LowRank& l, const float* const* rows, int inputs, float* low, int stride) {
    int k = 0;
    for (; k + 4 <= l.rank; k += 4) lower<R, 4>(l, k, rows, inputs, low, stride);
    for (; k < l.rank; ++k) lower<R, 1>(l, k, rows, inputs, low, stride);
}

INLINE void prefetch_all(const void* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

// Rows [a, b) of x, whose floats are at rows[a .. b), those beside each other that have the same adapter a few at a time.
// `next`: there is a product after this one.  What it and this one will read of an adapter is on its way meanwhile.
inline void lower(const Operand& x, const float* const* rows, int a, int b, bool next) {
    constexpr int FEW = LANES == 16 ? 4 : 2;  // what the registers hold
    const LowRank* before = nullptr;
    while (a < b) {
        int end = a + 1;
        while (end < b && end < a + FEW && x.who[end] == x.who[a]) ++end;
        if (const LowRank* l = x.who[a]) {
            l += x.which;
            if (l != before) {
                prefetch_all(l->b, l->b_bytes);
                if (next) prefetch_all(l[1].a, l[1].a_bytes);
                before = l;
            }
            float* low = x.low + size_t(a) * x.stride;
            if (!l->rank) {}
            else if (end - a == FEW) lower<FEW>(*l, rows + a, x.inputs, low, x.stride);
            else for (int r = a; r < end; ++r) lower<1>(*l, rows + r, x.inputs, low + size_t(r - a) * x.stride, x.stride);
        }
        a = end;
    }
}

// What adapters add to R rows of a tile, in one order for each row.
template <int R>
INLINE void adapt(const Operand& x, int row, int block, int lane, Floats (&f)[R][2]) {
    const LowRank* const* who = x.who + row;
    const float* low = x.low + size_t(row) * x.stride;
    bool alike = true;
    for (int r = 1; r < R; ++r) alike &= who[r] == who[0];
    if (alike) {
        if (!who[0] || !who[0][x.which].rank) return;
        UNROLL(2, h, const LowRank::Half& half = who[0][x.which].halves[2 * block + h];
            for (int k = 0; k < half.rank; ++k) {
                Floats b = load(half.b + size_t(k) * HALF + lane);
                UNROLL(R, r, f[r][h] = fma(b, all(low[size_t(r) * x.stride + half.from + k]), f[r][h]));
            });
        return;
    }
    UNROLL(R, r, if (who[r] && who[r][x.which].rank) {
        UNROLL(2, h, const LowRank::Half& half = who[r][x.which].halves[2 * block + h];
            for (int k = 0; k < half.rank; ++k)
                f[r][h] = fma(load(half.b + size_t(k) * HALF + lane), all(low[size_t(r) * x.stride + half.from + k]),
                              f[r][h]));
    });
}

// From a product to what is wanted: scale, bias, what adapters add, then the activation, the gate or the sum with what is there.
template <int R>
INLINE void finish(const Linear& l, const Operand& x, int block, int lane, Floats (&f)[R][2], const Target& to, int row) {
    const int column = block * COLUMNS + lane;
    if (l.format == INT8) {
        Floats s0 = load(l.scales + column), s1 = load(l.scales + column + HALF);
        UNROLL(R, r, f[r][0] = mul(f[r][0], s0); f[r][1] = mul(f[r][1], s1));
    }
    if (l.bias) {
        Floats b0 = load(l.bias + column), b1 = load(l.bias + column + HALF);
        UNROLL(R, r, f[r][0] = add(f[r][0], b0); f[r][1] = add(f[r][1], b1));
    }
    if (x.who) adapt<R>(x, row, block, lane, f);
    if (to.then == GATE) {  // the first half is the gate, the second what it lets through
        float* out = to.out + size_t(row) * to.stride + block * HALF + lane;
        UNROLL(R, r, store(out + size_t(r) * to.stride, mul(activated(to.activation, f[r][0]), f[r][1])));
        return;
    }
    float* out = to.out + size_t(row) * to.stride + column;
    if (to.then == ADD) {
        UNROLL(R, r, const float* old = out + size_t(r) * to.stride;
            f[r][0] = add(load(old), f[r][0]); f[r][1] = add(load(old + HALF), f[r][1]));
    } else if (to.then == ACTIVATE) {
        UNROLL(R, r, UNROLL(2, h, f[r][h] = activated(to.activation, f[r][h])));
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
        else if (l.format == INT8) multiply_int8<R>(l, w, lane, x, row, f, ahead);
        else if (l.format == INT4) multiply_int4<R, false>(l, w, lane, x, row, f, ahead);
        else multiply_int4<R, true>(l, w, lane, x, row, f, ahead);
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
inline const auto TILES = tiles_of(std::make_integer_sequence<int, MOST_ROWS>{});

// Rows [0, rows) of x, blocks [from, to_block) of the outputs; `after` is what is read next.
inline void gemm(const Linear& l, const Operand& x, int rows, int from, int to_block, const Target& to,
                 const uint8_t* after = nullptr) {
    if (!rows) return;
    const int most = l.format == INT8 && rows > 36 && LANES == 16 ? 8 : l.format >= INT4 && LANES == 16 ? 8 : MOST_ROWS;
    const int tiles = (rows + most - 1) / most;
    const int steps = l.format == FLOAT32 ? l.inputs : l.inputs / 4;
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
    if (rows == 1 && after)  // a single row waits for memory: what it reads next is on its way
        for (int i = 0; i < 16384; i += 64) prefetch_later(after + i);
}
