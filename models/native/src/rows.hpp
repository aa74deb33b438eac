// Operations on one row at a time: norms, rotations, quantisation, argmax.
//
// A row's length is padded to a multiple of PADDING with zeros, which stay zeros.
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

// The largest magnitude of N floats.  `nonfinite` becomes NaN if one of them is infinite or NaN.
template <int N>
INLINE float peak(const float* values, Floats& nonfinite) {
    Floats top = zero();
    UNROLL(N / LANES, i, Floats v = load(values + i * LANES); top = largest(top, magnitude(v));
           nonfinite = fma(v, zero(), nonfinite));
    return highest(top);
}
INLINE float inverse(float most, float largest_code) { return most > 0.f ? largest_code / most : 0.f; }

// The factor of the sum of a group's inputs, in scales of the weights.  Codes of weights have 128 or 8 added, which is
// subtracted by it; in shifted formats the group's least weight is multiplied with the sum itself.
constexpr float offset_of(int format) { return format == INT8 || format == INT8_WIDE ? -128.f : format == INT4 ? -8.f : 1.f; }

// [K] floats to codes [K], scales [K / SPAN] and offsets [K / GROUP].  Of each SPAN the largest magnitude becomes 127.
// Where a number is infinite or NaN, the first scale is NaN, so that it is not lost among integers.
__attribute__((noinline)) inline void quantise(const float* values, int inputs, float offset, int8_t* codes, float* scales,
                                               float* offsets) {
    constexpr int PARTS = SPAN / LANES;  // registers of a span; four spans at a time
    Floats nonfinite = zero();
    for (int k = 0; k < inputs; k += 4 * SPAN, values += 4 * SPAN, codes += 4 * SPAN, scales += 4, offsets += 2) {
        alignas(16) float peaks[4];
        alignas(16) int32_t sums[4];
        Floats top[4];
        Ints sum[4];
        UNROLL(4, s, top[s] = zero(); UNROLL(PARTS, i, Floats v = load(values + s * SPAN + i * LANES);
            top[s] = largest(top[s], magnitude(v)); nonfinite = fma(v, zero(), nonfinite)));
        store_peaks(peaks, top[0], top[1], top[2], top[3]);
        UNROLL(4, s, sum[s] = all_ints(0); Floats scale = all(inverse(peaks[s], 127.f)); UNROLL(PARTS, i,
            store_codes(codes + s * SPAN + i * LANES, mul(load(values + s * SPAN + i * LANES), scale), sum[s])));
        store_int_sums(sums, sum[0], sum[1], sum[2], sum[3]);
        for (int s = 0; s < 4; ++s) scales[s] = peaks[s] / 127.f;
        for (int g = 0; g < 2; ++g)
            offsets[g] = offset * (scales[2 * g] * float(sums[2 * g]) + scales[2 * g + 1] * float(sums[2 * g + 1]));
    }
    if (is_nan(nonfinite)) scales[-inputs / SPAN] = NAN;
}

// The same for INT8_WIDE, where WIDE inputs share a scale: scales and offsets [K / WIDE].
__attribute__((noinline)) inline void quantise_wide(const float* values, int inputs, int8_t* codes, float* scales, float* offsets) {
    Floats nonfinite = zero();
    for (int k = 0; k < inputs; k += WIDE, values += WIDE, codes += WIDE) {
        const float most = peak<WIDE>(values, nonfinite);
        const Floats inverted = all(inverse(most, 127.f));
        Ints sum = all_ints(0);
        UNROLL(WIDE / LANES, i, store_codes(codes + i * LANES, mul(load(values + i * LANES), inverted), sum));
        scales[k / WIDE] = most / 127.f;
        offsets[k / WIDE] = offset_of(INT8_WIDE) * (scales[k / WIDE] * float(sum_ints(sum)));
    }
    if (is_nan(nonfinite)) scales[0] = NAN;
}

// Converts row `row` of x from floats to what the product reads.
inline void prepare(const Operand& x, int format, int row, const float* values) {
    const size_t start = size_t(row) * x.inputs;
    if (format == FLOAT32) {
        memcpy(x.floats + start, values, size_t(x.inputs) * sizeof(float));
        return;
    }
    if (format == INT8_WIDE) {
        quantise_wide(values, x.inputs, x.codes + start, x.scales + start / WIDE, x.offsets + start / WIDE);
        return;
    }
    quantise(values, x.inputs, offset_of(format), x.codes + start, x.scales + start / SPAN, x.offsets + start / GROUP);
}

// The lowest index of the largest of n floats; -1 if one of them is infinite or NaN.
inline int argmax(const float* x, int n) {
    constexpr int SOME = 8 * LANES;
    float most = -INFINITY;
    int best = 0;
    Floats nonfinite = zero();
    for (int i = 0; i < n; i += SOME) {
        Floats top = all(-INFINITY);
        for (int j = i; j < std::min(i + SOME, n); j += LANES) {
            Floats v = load(x + j);
            if (n - j < LANES) v = first(v, n - j, x[j]);
            top = largest(top, v);
            nonfinite = fma(v, zero(), nonfinite);
        }
        if (const float here = highest(top); here > most) {
            most = here;
            best = i;
        }
    }
    if (is_nan(nonfinite)) return -1;
    while (x[best] != most) ++best;
    return best;
}

// Features d and d + R / 2 of a head, turned by an angle (Su et al. 2021); cosines and sines [R / 2].
inline void rotate(float* x, const float* cosines, const float* sines, int width) {
    const int half = width / 2;
    for (int d = 0; d < half; ++d) {
        float a = x[d], b = x[d + half];
        x[d] = a * cosines[d] - b * sines[d];
        x[d + half] = b * cosines[d] + a * sines[d];
    }
}

// The sum of f(i) for i < width, in one order: lanes first, then those that do not fill a register.
template <class F, class G>
INLINE float sum_features(int width, F&& lanes, G&& one) {
    Floats s = zero();
    int d = 0;
    for (; d + LANES <= width; d += LANES) s = lanes(d, s);
    float total = sum(s);
    for (; d < width; ++d) total = one(d, total);
    return total;
}

// In place, the norm of features [width] of one head (Qwen 3, Gemma 3) or of several (OLMo 2).  What lies behind them
// belongs to others, so nothing there is read.
inline void normalise_features(NormKind kind, const float* weight, const float* bias, float eps, float* x, int width) {
    float mean = 0.f;
    if (kind == LAYER_NORM) {
        mean = sum_features(width, [&](int d, Floats s) INLINED { return add(s, load(x + d)); },
                            [&](int d, float s) { return s + x[d]; }) / float(width);
    }
    const float squares = sum_features(
        width, [&](int d, Floats s) INLINED { Floats v = sub(load(x + d), all(mean)); return fma(v, v, s); },
        [&](int d, float s) { return s + (x[d] - mean) * (x[d] - mean); });
    const float scale = 1.f / std::sqrt(squares / float(width) + eps);
    if (kind == RMS_NORM) for (int d = 0; d < width; ++d) x[d] = x[d] * scale * weight[d];
    else for (int d = 0; d < width; ++d) x[d] = (x[d] - mean) * scale * weight[d] + bias[d];
}

// [N] logits: scaled, then brought within -cap .. cap if there is a cap.  N is a multiple of COLUMNS.
inline void scale_logits(float* x, int count, float scale, float cap) {
    for (int i = 0; i < count; i += LANES) {
        const Floats v = mul(load(x + i), all(scale));
        store(x + i, cap ? capped(v, cap) : v);
    }
}
