// What is done to one row at a time: norms, rotations, making bytes of floats, finding the largest.
//
// Knows no weights' layout and no threads.  A row's length is padded to a multiple of GROUP with zeros, which stay zeros.
#pragma once

#include <algorithm>

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

// N floats' largest magnitude.  What is no number is none in `poison` from then on.
template <int N>
INLINE float peak(const float* values, Floats& poison) {
    Floats top = zero();
    UNROLL(N / LANES, i, Floats v = load(values + i * LANES); top = largest(top, magnitude(v)); poison = fma(v, zero(), poison));
    return highest(top);
}
INLINE float inverse(float most, float largest_code) { return most > 0.f ? largest_code / most : 0.f; }

// FINE floats, `inverse` times each, as signed bytes; returns their sum.
INLINE int encode(const float* values, float inverse, int8_t* codes) {
    Ints s = all_ints(0);
    UNROLL(FINE / LANES, i, store_codes(codes + i * LANES, mul(load(values + i * LANES), all(inverse)), s));
    return sum_ints(s);
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
    const int kept = format == INT8 ? GROUP : FINE;
    int32_t* sums = x.sums + size_t(row) * (x.inputs / kept);
    Floats poison = zero();
    for (int g = 0; g < x.inputs / GROUP; ++g, values += GROUP, codes += GROUP) {
        const float most = peak<GROUP>(values, poison);
        scales[g] = most / 127.f;
        const int first = encode(values, inverse(most, 127.f), codes);
        const int second = encode(values + FINE, inverse(most, 127.f), codes + FINE);
        if (format == INT8) { *sums++ = -128 * (first + second); continue; }
        *sums++ = first;
        *sums++ = second;
    }
    if (is_nan(poison)) scales[0] = NAN;
}

// The first of the largest of n floats; -1 where one of them is infinite or no number.
inline int likeliest(const float* x, int n) {
    constexpr int SOME = 8 * LANES;
    float most = -INFINITY;
    int best = 0;
    Floats poison = zero();
    for (int i = 0; i < n; i += SOME) {
        Floats top = all(-INFINITY);
        for (int j = i; j < std::min(i + SOME, n); j += LANES) {
            Floats v = load(x + j);
            if (n - j < LANES) v = first(v, n - j, x[j]);
            top = largest(top, v);
            poison = fma(v, zero(), poison);
        }
        if (const float here = highest(top); here > most) {
            most = here;
            best = i;
        }
    }
    if (is_nan(poison)) return -1;
    while (x[best] != most) ++best;
    return best;
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
