// Recurrent layers: a causal convolution of each channel, and the scan of a state through the rows of a sequence
// (models/network/recurrent_mixers.py has the formulas).
//
// All arithmetic is in float32.  A row's convolution reads the rows before it, from the step or from the state, so rows and
// channels are independent.  The state of a head is a matrix whose columns, one for each feature of the head's values, are
// independent too: it is stored and computed in tiles of TILE columns, and a tile goes through the rows of its sequence in
// order.  A tile fits the first-level cache; with one row for a sequence it is read once and written once.
//
// Layout of a state: for each recurrent layer the last K - 1 inputs of the convolution [K - 1][C], then the tiles
// [H][P / TILE][N][TILE].  C are the channels; every head's are padded with zeros to a multiple of TILE, as P is.
#pragma once

#include <vector>

#include "rows.hpp"

enum Mixer : int32_t { ATTENTION = 0, CONVOLUTION = 1, STATE_SPACE = 2, DELTA = 3, NO_MIXER = 4 };

constexpr int TILE = 32;              // columns of a state
constexpr int MOST_CHANNELS = 128;    // of a run that is no head, a multiple of TILE
constexpr int SCAN_AHEAD = 1024;      // numbers of a state that are prefetched ahead
constexpr float LEAST_SQUARE = 1e-6f; // is added to the sum of squares of queries and keys before they are normed

// The same in all recurrent layers (models/network/model_config.py, RecurrentConfig).
struct Recurrence {
    int32_t kernel;       // K
    int32_t heads;        // H
    int32_t head_width;   // P
    int32_t key_heads;    // G
    int32_t key_width;    // N
    int32_t norm_groups;  // of STATE_SPACE
    int32_t gate_first;   // of STATE_SPACE: features are gated, then normed
    float norm_eps;
    float least_step, most_step;  // of STATE_SPACE
    float update_scale;   // of DELTA
    int32_t unused;
};

// The parameters of a recurrent layer besides its products; null where the kind has none.
struct RecurrentWeights {
    const float* taps;       // [K][C], the last for the token itself
    const float* taps_bias;  // [C], or null
    const float* rates;      // [H], negative: a step s multiplies the state by e^(rate * s)
    const float* step_bias;  // [H]
    const float* skip;       // [H]
    const float* norm;       // [H * P] weights of the gated norm, or null: none
};

// The state slots of one sequence in a step (models/executors/contract.py).
struct StateUse {
    int32_t read, write, border_rows, border;
};

// Channels that are convolved together: a head of queries, keys or values, or a part of them.
struct Channels {
    int from, to, width;  // first column of the input product, first padded channel, count
    float norm;           // the features are l2-normed and multiplied by it; 0: they are not
};

// Where everything of a kind of layer is.
struct MixerShape {
    int columns = 0;   // of the input product
    int inner = 0;     // features of the mixer's output
    int gate = -1;     // first column of the gate of the output; -1: none
    int steps = -1;    // first column of the numbers that decays follow from; -1: none
    int channels = 0;  // C
    int queries = 0, keys = 0, values = 0;  // first channel of each
    int tiles = 0;     // of all heads
    std::vector<Channels> runs;

    // Heads that are normed, or that padding separates, are runs of their own; others are cut to longer ones.
    void add_heads(int count, int width, float norm = 0.f) {
        const bool apart = norm || width % TILE;
        const int total = count * width, most = apart ? width : MOST_CHANNELS;
        for (int done = 0; done < total; done += most) {
            const int some = std::min(most, total - done);
            runs.push_back({columns, channels, some, norm});
            columns += some;
            channels += padded_head(some);
        }
    }
    static int padded_head(int width) { return (width + TILE - 1) / TILE * TILE; }
};

inline MixerShape mixer_shape(int mixer, const Recurrence& r, int width) {
    MixerShape shape;
    const int inner = r.heads * r.head_width;
    if (mixer == CONVOLUTION) {  // columns: factors B, gates C, inputs X
        for (int c = 0; c < width; c += MOST_CHANNELS) shape.add_heads(1, std::min(MOST_CHANNELS, width - c));
        shape.columns = 3 * width;
        shape.inner = width;
        return shape;
    }
    shape.inner = inner;
    shape.tiles = r.heads * MixerShape::padded_head(r.head_width) / TILE;
    if (mixer == STATE_SPACE) {  // gate, x, B, C, dt
        shape.gate = 0;
        shape.columns = inner;
        shape.add_heads(r.heads, r.head_width);
        shape.keys = shape.channels;
        shape.add_heads(r.key_heads, r.key_width);
        shape.queries = shape.channels;
        shape.add_heads(r.key_heads, r.key_width);
        shape.steps = shape.columns;
        shape.columns += r.heads;
        return shape;
    }
    shape.add_heads(r.key_heads, r.key_width, 1.f / std::sqrt(float(r.key_width)));  // q, k, v, gate, beta, decay
    shape.keys = shape.channels;
    shape.add_heads(r.key_heads, r.key_width, 1.f);
    shape.values = shape.channels;
    shape.add_heads(r.heads, r.head_width);
    shape.gate = shape.columns;
    shape.steps = shape.gate + inner;
    shape.columns = shape.steps + 2 * r.heads;
    return shape;
}

// The inputs of one row's convolution: rows of the step, before them those of the state.
struct ConvolutionInput {
    const float* row;   // the token's columns; those of the token before are `stride` before them
    size_t stride;
    int own;            // rows of the sequence in this step up to the token, itself included
    const float* past;  // [K - 1][C] before the step's first row; null: no token is before it
    int kernel, channels;
    int partner;        // inputs are multiplied by the columns so many further; 0: by none
};

// Inputs [c, c + LANES) of a run, `back` tokens before the row's; zeros behind its width.
INLINE Floats convolution_input(const ConvolutionInput& in, const Channels& run, int back, int c) {
    const int rest = run.width - c;
    if (rest <= 0) return zero();
    if (back >= in.own) {
        const size_t at = size_t(in.kernel - 2 - (back - in.own)) * in.channels;
        return in.past ? load(in.past + at + run.to + c) : zero();
    }
    const float* at = in.row - back * in.stride + run.from + c;
    Floats x = load(at);
    if (in.partner) x = mul(x, load(at + in.partner));
    return rest < LANES ? first(x, rest, 0.f) : x;
}

// Channels [c, c + LANES) of a run, the convolution of their inputs.
INLINE Floats convolve(const ConvolutionInput& in, const Channels& run, const RecurrentWeights& w, int c) {
    const float* taps = w.taps + run.to + c;
    Floats s = w.taps_bias ? load(w.taps_bias + run.to + c) : zero();
    for (int back = in.kernel - 1; back >= 0; --back, taps += in.channels)
        s = fma(convolution_input(in, run, back, c), load(taps), s);
    return s;
}

// One run of a row: silu of its convolution, l2-normed if the run is, to out [width padded to TILE].
inline void convolve_heads(const ConvolutionInput& in, const Channels& run, const RecurrentWeights& w, float* out) {
    const int count = MixerShape::padded_head(run.width);
    Floats squares = zero();
    for (int c = 0; c < count; c += LANES) {
        Floats x = silu(convolve(in, run, w, c));
        if (run.width - c < LANES) x = first(x, std::max(run.width - c, 0), 0.f);
        squares = fma(x, x, squares);
        store(out + c, x);
    }
    if (!run.norm) return;
    const Floats scale = all(run.norm / std::sqrt(sum(squares) + LEAST_SQUARE));
    for (int c = 0; c < count; c += LANES) store(out + c, mul(load(out + c), scale));
}

// One run of a row: the gate [width] times the convolution, to out; zeros behind its width.
inline void convolve_gated(const ConvolutionInput& in, const Channels& run, const RecurrentWeights& w, const float* gate,
                           float* out) {
    for (int c = 0; c < run.width; c += LANES) {
        const Floats x = mul(load(gate + c), convolve(in, run, w, c));
        store(out + c, run.width - c < LANES ? first(x, run.width - c, 0.f) : x);
    }
}

// Stores the inputs of a run that the next token's convolution needs, to kept [K - 1][C].  Returns whether all are finite.
inline bool keep_inputs(const ConvolutionInput& in, const Channels& run, float* kept) {
    const int count = MixerShape::padded_head(run.width);
    Floats nonfinite = zero();
    for (int i = 0; i < in.kernel - 1; ++i)
        for (int c = 0; c < count; c += LANES) {
            const Floats x = convolution_input(in, run, in.kernel - 2 - i, c);
            nonfinite = fma(x, zero(), nonfinite);
            store(kept + size_t(i) * in.channels + run.to + c, x);
        }
    return !is_nan(nonfinite);
}

// The numbers of one row that decays follow from, to decays [H] by which states are multiplied, and updates [H] by which
// what is added to them is multiplied.  Up to LANES - 1 numbers behind them are read and written.
inline void compute_steps(int mixer, const Recurrence& r, const RecurrentWeights& w, const float* numbers, float* decays,
                          float* updates) {
    for (int h = 0; h < r.heads; h += LANES) {
        const Floats bias = load(w.step_bias + h), rates = load(w.rates + h);
        if (mixer == DELTA) {
            store(updates + h, mul(logistic(load(numbers + h)), all(r.update_scale)));
            store(decays + h, exponential(mul(rates, softplus(add(load(numbers + r.heads + h), bias)))));
            continue;
        }
        const Floats step = softplus(add(load(numbers + h), bias));
        const Floats clamped = largest(all(r.least_step), least(all(r.most_step), step));
        store(updates + h, clamped);
        store(decays + h, exponential(mul(rates, clamped)));
    }
}

// One tile of a head's state, and what the rows of its sequence do with it.  Pointers are to the first row's numbers.
struct Scan {
    const float *values, *keys, *queries;  // [TILE] of the head; [N] of its key head
    size_t stride;                         // of rows of these
    const float *decays, *updates;         // of the head
    size_t step_stride;
    float skip;                            // STATE_SPACE
    float* out;                            // [width] features of the output
    size_t out_stride;
    int width;                             // up to TILE
    const float* from;                     // [N][TILE] the state before the first row
    float* to;                             // the state after the last row, and after each row until then
    float* border;                         // the state after `border_rows` rows
    int rows, border_rows, key_width;
    bool past_cache;                       // `to` is written past the cache if there is one row
};

constexpr int SCAN_LANES = LANES < 8 ? 4 * LANES : TILE;  // columns that are computed together: what the registers hold

INLINE void store_features(const Scan& scan, int row, int c, const Floats (&y)[SCAN_LANES / LANES]) {
    float* out = scan.out + row * scan.out_stride + c;
    if (scan.width - c >= SCAN_LANES) {
        UNROLL(SCAN_LANES / LANES, v, store(out + v * LANES, y[v]));
        return;
    }
    float features[SCAN_LANES];
    UNROLL(SCAN_LANES / LANES, v, store(features + v * LANES, y[v]));
    std::copy_n(features, std::max(scan.width - c, 0), out);
}

template <bool PAST_CACHE>
INLINE void store_state(float* p, Floats x) {
    if constexpr (PAST_CACHE) store_past_cache(p, x);
    else store(p, x);
}

// S = decay S + (step x) B, y = S C + skip x: columns [c, c + SCAN_LANES) of one row.
template <bool PAST_CACHE>
INLINE void scan_state_space_row(const Scan& scan, int row, int c, const float* from, float* to) {
    constexpr int V = SCAN_LANES / LANES, CHAINS = V < 4 ? 2 : 1;  // of sums, since an addition takes several cycles
    const float* keys = scan.keys + row * scan.stride;
    const float* queries = scan.queries + row * scan.stride;
    const Floats decay = all(scan.decays[row * scan.step_stride]), step = all(scan.updates[row * scan.step_stride]);
    Floats x[V], y[CHAINS][V];
    UNROLL(V, v, x[v] = load(scan.values + row * scan.stride + c + v * LANES);
           y[0][v] = mul(x[v], all(scan.skip)); x[v] = mul(x[v], step));
    UNROLL(CHAINS - 1, i, UNROLL(V, v, y[i + 1][v] = zero()));
    const auto update = [&](int n, auto chain) INLINED {
        const Floats key = all(keys[n]), query = all(queries[n]);
        UNROLL(V, v, const size_t at = size_t(n) * TILE + c + v * LANES;
            if constexpr (PAST_CACHE) prefetch(from + at + SCAN_AHEAD);
            const Floats s = fma(x[v], key, mul(decay, load(from + at)));
            y[chain][v] = fma(s, query, y[chain][v]); store_state<PAST_CACHE>(to + at, s));
    };
    int n = 0;
    for (; n + CHAINS <= scan.key_width; n += CHAINS) { UNROLL(CHAINS, i, update(n + i, i)); }
    for (; n < scan.key_width; ++n) update(n, std::integral_constant<int, 0>{});
    UNROLL(CHAINS - 1, i, UNROLL(V, v, y[0][v] = add(y[0][v], y[i + 1][v])));
    store_features(scan, row, c, y[0]);
}

// S = decay S, d = update (v - S^T k), S = S + k d, y = S^T q: columns [c, c + SCAN_LANES) of one row.
template <bool PAST_CACHE>
INLINE void scan_delta_row(const Scan& scan, int row, int c, const float* from, float* to) {
    constexpr int V = SCAN_LANES / LANES, CHAINS = V < 4 ? 2 : 1;
    const float* keys = scan.keys + row * scan.stride;
    const float* queries = scan.queries + row * scan.stride;
    const Floats decay = all(scan.decays[row * scan.step_stride]), rate = all(scan.updates[row * scan.step_stride]);
    Floats d[V], y[CHAINS][V];
    UNROLL(CHAINS, i, UNROLL(V, v, y[i][v] = zero()));
    const auto recall = [&](int n, auto chain) INLINED {
        const Floats key = all(keys[n]);
        UNROLL(V, v, const size_t at = size_t(n) * TILE + c + v * LANES;
            if constexpr (PAST_CACHE) prefetch(from + at + SCAN_AHEAD);
            y[chain][v] = fma(key, load(from + at), y[chain][v]));
    };
    int n = 0;
    for (; n + CHAINS <= scan.key_width; n += CHAINS) { UNROLL(CHAINS, i, recall(n + i, i)); }
    for (; n < scan.key_width; ++n) recall(n, std::integral_constant<int, 0>{});
    UNROLL(CHAINS - 1, i, UNROLL(V, v, y[0][v] = add(y[0][v], y[i + 1][v])));
    UNROLL(V, v, const Floats value = load(scan.values + row * scan.stride + c + v * LANES);
           d[v] = mul(rate, sub(value, mul(decay, y[0][v]))));
    UNROLL(CHAINS, i, UNROLL(V, v, y[i][v] = zero()));
    const auto update = [&](int n, auto chain) INLINED {
        const Floats key = all(keys[n]), query = all(queries[n]);
        UNROLL(V, v, const size_t at = size_t(n) * TILE + c + v * LANES;
            const Floats s = fma(d[v], key, mul(decay, load(from + at)));
            y[chain][v] = fma(s, query, y[chain][v]); store_state<PAST_CACHE>(to + at, s));
    };
    n = 0;
    for (; n + CHAINS <= scan.key_width; n += CHAINS) { UNROLL(CHAINS, i, update(n + i, i)); }
    for (; n < scan.key_width; ++n) update(n, std::integral_constant<int, 0>{});
    UNROLL(CHAINS - 1, i, UNROLL(V, v, y[0][v] = add(y[0][v], y[i + 1][v])));
    store_features(scan, row, c, y[0]);
}

template <bool PAST_CACHE>
void scan_row(int mixer, const Scan& scan, int row, const float* from) {
    for (int c = 0; c < TILE; c += SCAN_LANES) {
        if (mixer == DELTA) scan_delta_row<PAST_CACHE>(scan, row, c, from, scan.to);
        else scan_state_space_row<PAST_CACHE>(scan, row, c, from, scan.to);
    }
}

// A tile through all rows of its sequence.
inline void scan_tile(int mixer, const Scan& scan) {
    const float* from = scan.from;
    const bool past_cache = scan.past_cache && scan.rows == 1;
    for (int row = 0; row < scan.rows; ++row, from = scan.to) {
        if (past_cache) scan_row<true>(mixer, scan, row, from);
        else scan_row<false>(mixer, scan, row, from);
        if (row + 1 == scan.border_rows) memcpy(scan.border, scan.to, size_t(scan.key_width) * TILE * sizeof(float));
    }
}

inline bool is_finite(const float* x, size_t count) {  // a multiple of LANES
    Floats nonfinite = zero();
    for (size_t i = 0; i < count; i += LANES) nonfinite = fma(load(x + i), zero(), nonfinite);
    return !is_nan(nonfinite);
}

// The features [inner] of a recurrent layer's output: gated and normed, to out.
inline void gate_features(int mixer, const Recurrence& r, const float* norm, const float* x, const float* gate, int inner,
                          float* out) {
    const bool first = mixer == STATE_SPACE && (r.gate_first || !norm);
    for (int i = 0; i < inner; i += LANES) {
        const Floats v = load(x + i);
        store(out + i, first ? mul(v, silu(load(gate + i))) : v);
    }
    if (!norm) return;
    const int groups = mixer == DELTA ? r.heads : r.norm_groups, width = inner / groups;
    for (int g = 0; g < groups; ++g)
        normalise_features(RMS_NORM, norm + g * width, nullptr, r.norm_eps, out + g * width, width);
    if (first) return;
    for (int i = 0; i < inner; i += LANES) store(out + i, mul(load(out + i), silu(load(gate + i))));
}
