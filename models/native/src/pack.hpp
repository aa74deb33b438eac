// Weights from floats to the layouts of gemm.hpp.  Rows are outputs, as checkpoints have them.
//
// The one idea: int8 has one scale an output, its largest magnitude being 127, so that a product is exact integers times
// one number.  4-bit weights are not made here but found: what GGUF's Q4_0 and Q4_1 or a calibration (models/quantize.py)
// left as whole multiples of a scale is packed as it was, to the bit, and nothing else is.  What is padded weighs nothing.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.hpp"

// Row `n` of [N, K] floats, its padding zeros: whoever packs says where an output's weights come from.
using Source = const float* const*;  // [N rounded up], null where there is none

inline void pack_float32(Source rows, int outputs, int inputs, int k, float* out) {
    for (int b = 0; b < outputs / COLUMNS; ++b, out += size_t(k) * COLUMNS)
        for (int c = 0; c < COLUMNS; ++c) {
            const float* row = rows[b * COLUMNS + c];
            for (int i = 0; i < k; ++i) out[size_t(i) * COLUMNS + c] = row && i < inputs ? row[i] : 0.f;
        }
}

INLINE uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

constexpr float WHOLE = 12582912.f;  // 1.5 * 2^23: what is added to it is rounded to a whole number, ties to even

// One output at a time: its codes [K] side by side, then four by four to their places.
inline void pack_int8(Source rows, int outputs, int inputs, int k, uint8_t* out, float* scales) {
    std::vector<uint8_t> codes(k);
    for (int b = 0; b < outputs / COLUMNS; ++b, out += size_t(k) * COLUMNS)
        for (int c = 0; c < COLUMNS; ++c) {
            const float* row = rows[b * COLUMNS + c];
            uint32_t top = 0;  // magnitudes are ordered as their bits are
            for (int i = 0; row && i < inputs; ++i) top = std::max(top, bits_of(row[i]) & 0x7fffffffu);
            float most; memcpy(&most, &top, 4);
            const float inverse = most > 0.f ? 127.f / most : 0.f;
            scales[b * COLUMNS + c] = most / 127.f;
            std::fill(codes.begin(), codes.end(), uint8_t(128));
            for (int i = 0; row && i < inputs; ++i) codes[i] = uint8_t(bits_of(row[i] * inverse + WHOLE) + 128);
            for (int i = 0; i < k / 4; ++i) memcpy(out + (size_t(i) * COLUMNS + c) * 4, codes.data() + 4 * i, 4);
        }
}

INLINE fp16 half(float x) {  // to the nearest, ties to even; what is too large becomes the largest
    float a = std::fabs(x);
    const fp16 sign = std::signbit(x) ? 0x8000 : 0;
    if (!(a < 65504.f)) return sign | 0x7bff;
    if (a < 0x1p-14f) return sign | fp16(std::nearbyintf(a * 0x1p24f));
    uint32_t bits; memcpy(&bits, &a, 4);
    return sign | fp16(((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
}

// Whether a group [FINE] is whole numbers from -8 to 7 times `scale`, itself a half.
inline bool made_of(const float* w, float scale) {
    if (widen_half(half(scale)) != scale) return false;
    for (int i = 0; i < FINE; ++i) {
        const float n = std::nearbyintf(w[i] / scale);
        if (!(n >= -8.f && n <= 7.f) || n * scale != w[i]) return false;
    }
    return true;
}

// The scale that a group is made of, NaN if there is none.  The largest magnitude is 8 to 1 scales; the scale's sign is
// that for which 8 fits.
inline float scale_of(const float* w) {
    float top = 0.f;
    for (int i = 0; i < FINE; ++i) {
        if (!std::isfinite(w[i])) return NAN;
        if (std::fabs(w[i]) > std::fabs(top)) top = w[i];
    }
    if (top == 0.f) return 0.f;
    for (int n = 8; n >= 1; --n)
        for (float scale : {top / float(-n), top / float(n)})
            if (made_of(w, scale)) return scale;
    return NAN;
}

struct Shift {
    float scale, least;  // both halves; NaN: none
};

inline bool made_of(const float* w, Shift s) {
    for (int i = 0; i < FINE; ++i) {
        const float n = std::nearbyintf((w[i] - s.least) / s.scale);
        if (!(n >= 0.f && n <= 15.f) || n * s.scale + s.least != w[i]) return false;
    }
    return true;
}

// The same of a group whose codes stand above a least weight.  From its smallest to its largest weight it is 15 to 1
// scales, of the 15 that there are.
inline Shift shift_of(const float* w) {
    float low = w[0], high = w[0];
    for (int i = 0; i < FINE; ++i) {
        if (!std::isfinite(w[i])) return {NAN, NAN};
        low = std::fmin(low, w[i]), high = std::fmax(high, w[i]);
    }
    if (low == high) return widen_half(half(low)) == low ? Shift{0.f, low} : Shift{NAN, NAN};
    for (int n = 15; n >= 1; --n) {
        const float scale = widen_half(half((high - low) / float(n)));
        for (int first = 0; scale != 0.f && first <= 15 - n; ++first) {
            const Shift shift{scale, widen_half(half(low - float(first) * scale))};
            if (made_of(w, shift)) return shift;
        }
    }
    return {NAN, NAN};
}

inline Shift symmetric(float scale) { return {scale, -8.f * scale}; }

// Column `c` of a block's group.
inline void put(const float* w, Shift s, bool shifted, int c, uint8_t* group) {
    fp16* scales = (fp16*)(group + FINE * COLUMNS / 2);
    scales[c] = half(s.scale);
    if (shifted) scales[COLUMNS + c] = half(s.least);
    for (int i = 0; i < FINE; ++i) {
        const int code = s.scale == 0.f ? (shifted ? 0 : 8) : int(std::nearbyintf((w[i] - s.least) / s.scale));
        uint8_t& byte = group[(i / 8 * COLUMNS + c) * 4 + i % 4];
        byte = i % 8 < 4 ? uint8_t(code) : uint8_t(byte | code << 4);
    }
}

// False where a group is not made of 4-bit weights; what is written by then is worth nothing.
inline bool pack_int4(Source rows, int outputs, int inputs, int k, bool shifted, uint8_t* out) {
    const size_t bytes = shifted ? SHIFTED_BYTES : FINE_BYTES;
    for (int b = 0; b < outputs / COLUMNS; ++b)
        for (int g = 0; g < k / FINE; ++g)
            for (int c = 0; c < COLUMNS; ++c) {
                const float* row = rows[b * COLUMNS + c];
                float w[FINE];
                for (int i = 0; i < FINE; ++i)  // behind the last of a row its like: the inputs there are zeros
                    w[i] = row && g * FINE < inputs ? row[std::min(g * FINE + i, inputs - 1)] : 0.f;
                const Shift s = shifted ? shift_of(w) : symmetric(scale_of(w));
                if (s.scale != s.scale) return false;
                put(w, s, shifted, c, out + (size_t(b) * (k / FINE) + g) * bytes);
            }
    return true;
}

enum Kind : int32_t { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2 };  // GGUF's blocks of 32 numbers
constexpr int BLOCK_SIZES[] = {18, 20, 34};

// `count` blocks to floats [count * 32].  A code times a half is exact, so this is what anybody makes of them.
inline void decode(int kind, const uint8_t* blocks, int64_t count, float* out) {
    for (int64_t b = 0; b < count; ++b, blocks += BLOCK_SIZES[kind], out += 32) {
        fp16 halves[2]; memcpy(halves, blocks, 4);
        const float scale = widen_half(halves[0]);
        if (kind == Q8_0) {
            const int8_t* codes = (const int8_t*)blocks + 2;
            for (int i = 0; i < 32; ++i) out[i] = float(codes[i]) * scale;
        } else if (kind == Q4_0) {
            for (int i = 0; i < 16; ++i) {
                out[i] = float((blocks[2 + i] & 15) - 8) * scale;
                out[16 + i] = float((blocks[2 + i] >> 4) - 8) * scale;
            }
        } else {
            const float least = widen_half(halves[1]);
            for (int i = 0; i < 16; ++i) {
                out[i] = float(blocks[4 + i] & 15) * scale + least;
                out[16 + i] = float(blocks[4 + i] >> 4) * scale + least;
            }
        }
    }
}
