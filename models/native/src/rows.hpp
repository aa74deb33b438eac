// What is done to one row at a time: norms, rotations, and making bytes of floats.
//
// Knows no weights' layout and no threads.  A row's length is padded to a multiple of GROUP with zeros, which stay zeros.
#pragma once

#include "gemm.hpp"

enum NormKind : int32_t { LAYER_NORM = 0, RMS_NORM = 1 };

struct Norm {
    const float* weight;  // [W], zeros behind; null: no norm
    const float* bias;    // [W], zeros behind; LAYER_NORM only
};

inline float mean_square(const float* x, int width, int padded) {
    Floats s = zero();
    for (int i = 0; i < padded; i += LANES) { Floats v = load(x + i); s = fma(v, v, s); }
    return sum(s) / float(width);
}

// [W] to [W], in place or not.
inline void normalise(NormKind kind, const Norm& norm, float eps, const float* x, int width, int padded, float* out) {
    if (kind == RMS_NORM) {
        Floats scale = all(1.f / std::sqrt(mean_square(x, width, padded) + eps));
        for (int i = 0; i < padded; i += LANES) store(out + i, mul(mul(load(x + i), scale), load(norm.weight + i)));
        return;
    }
    Floats s = zero();
    for (int i = 0; i < padded; i += LANES) s = add(s, load(x + i));
    Floats mean = all(sum(s) / float(width));
    s = zero();
    for (int i = 0; i < width; i += LANES) {
        Floats v = sub(load(x + i), mean);
        if (width - i < LANES) v = first(v, width - i, 0.f);
        s = fma(v, v, s);
    }
    Floats scale = all(1.f / std::sqrt(sum(s) / float(width) + eps));
    for (int i = 0; i < padded; i += LANES)
        store(out + i, fma(mul(sub(load(x + i), mean), scale), load(norm.weight + i), load(norm.bias + i)));
}

// Row `row` of x, floats to whatever the product wants.  Of each GROUP the largest magnitude becomes 127.  A number that
// is none makes the row's first scale none, so that it is not lost among integers.
inline void prepare(const Operand& x, int format, int row, const float* values) {
    if (format == FLOAT32) {
        memcpy(x.floats + size_t(row) * x.inputs, values, size_t(x.inputs) * sizeof(float));
        return;
    }
    int8_t* codes = x.codes + size_t(row) * x.inputs;
    float* scales = x.scales + size_t(row) * (x.inputs / GROUP);
    int32_t* sums = x.sums + size_t(row) * (x.inputs / FINE);
    Floats poison = zero();
    for (int g = 0; g < x.inputs / GROUP; ++g, values += GROUP, codes += GROUP) {
        Floats v[GROUP / LANES], top = zero();
        UNROLL(GROUP / LANES, i, v[i] = load(values + i * LANES); top = largest(top, magnitude(v[i]));
            poison = fma(v[i], zero(), poison));
        float most = highest(top);
        scales[g] = most / 127.f;
        Floats inverse = all(most > 0.f ? 127.f / most : 0.f);
        Ints s[2] = {all_ints(0), all_ints(0)};
        UNROLL(GROUP / LANES, i, store_codes(codes + i * LANES, mul(v[i], inverse), s[i * LANES / FINE]));
        sums[2 * g] = sum_ints(s[0]);
        sums[2 * g + 1] = sum_ints(s[1]);
    }
    if (is_nan(poison)) scales[0] = NAN;
}

// Features d and d + D / 2 of a head, turned by an angle (Su et al. 2021); cosines and sines [D / 2].
inline void rotate(float* x, const float* cosines, const float* sines, int width) {
    const int half = width / 2;
    for (int d = 0; d < half; ++d) {
        float a = x[d], b = x[d + half];
        x[d] = a * cosines[d] - b * sines[d];
        x[d + half] = b * cosines[d] + a * sines[d];
    }
}

// RMS norm of one head's features (Qwen 3, Gemma 3).
inline void normalise_head(float* x, const float* weight, int width, float eps) {
    float s = 0;
    for (int d = 0; d < width; ++d) s += x[d] * x[d];
    float scale = 1.f / std::sqrt(s / float(width) + eps);
    for (int d = 0; d < width; ++d) x[d] = x[d] * scale * weight[d];
}
