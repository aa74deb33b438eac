// Weights from floats, or from blocks of GGUF files, to the layouts of gemm.hpp.  Rows are outputs, as checkpoints have them.
//
// Weights that a file stores as whole multiples of a scale for 32 of them (GGUF's Q8_0, Q5_0, Q4_0; with a least weight
// Q5_1, Q5_K, Q4_1, Q4_K; calibrated weights, models/quantization/quantize.py) are recognised in the floats, and packed with
// the same codes and scales.  Other weights are rounded to INT8, where the largest magnitude of a group becomes 127.  Padding
// is zeros.  Blocks are packed to the same bits as their floats would be; what the search would find is mostly known from
// their own codes and scales.
#pragma once

#include <algorithm>
#include <vector>

#include "blocks.hpp"

// The rows of an [N, K] matrix: the address of each output's weights, null for padding, and how they are stored (Kind).
struct Source {
    const uint8_t* const* rows;  // [N rounded up]
    const uint8_t* kinds;        // [N rounded up]
};

// Inputs [g * GROUP, (g + 1) * GROUP) of a row, as floats.
INLINE void load_group(int kind, const uint8_t* row, int g, float* out) {
    if (kind == FLOATS) { memcpy(out, row + sizeof(float) * GROUP * size_t(g), sizeof(float) * GROUP); return; }
    StoredGroup group;
    read_group(kind, row, g, group);
    widen_group(kind, group, out);
}

inline void pack_float32(const Source& source, int outputs, int inputs, int k, float* out) {
    std::vector<float> numbers(k);
    for (int b = 0; b < outputs / COLUMNS; ++b, out += size_t(k) * COLUMNS)
        for (int c = 0; c < COLUMNS; ++c) {
            const uint8_t* row = source.rows[b * COLUMNS + c];
            const int kind = source.kinds[b * COLUMNS + c];
            const float* weights = (const float*)row;
            if (row && kind != FLOATS) {
                for (int g = 0; g < inputs / GROUP; ++g) load_group(kind, row, g, numbers.data() + g * GROUP);
                weights = numbers.data();
            }
            for (int i = 0; i < k; ++i) out[size_t(i) * COLUMNS + c] = row && i < inputs ? weights[i] : 0.f;
        }
}

// The nearest whole number, ties to even, of -2^22 .. 2^22: what is added to 1.5 * 2^23 is rounded to one.
INLINE float nearest_whole(float x) { return (x + 12582912.f) - 12582912.f; }

INLINE fp16 half(float x) {  // to the nearest, ties to even; a larger magnitude becomes the largest one
    float a = std::fabs(x);
    const fp16 sign = std::signbit(x) ? 0x8000 : 0;
    if (!(a < 65504.f)) return sign | 0x7bff;
    if (a < 0x1p-14f) return sign | fp16(std::nearbyintf(a * 0x1p24f));
    uint32_t bits; memcpy(&bits, &a, 4);
    return sign | fp16(((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
}

INLINE fp16 half_above(float x) {  // the least half that is no less than x, which is positive and no more than 65504
    const fp16 nearest = half(x);
    return widen_half(nearest) < x ? nearest + 1 : nearest;
}

constexpr fp16 NAN_HALF = 0x7e00;

// How a group's weights follow from codes: code * scale + least; both are halves.
struct Scale {
    float scale, least;
};

// Whether a group [GROUP] equals code * scale for integer codes from -most to `top`; the scale must be a half.
inline bool is_exact(const float* w, float scale, float most, float top) {
    if (widen_half(half(scale)) != scale) return false;
    const float inverse = 1.f / scale;
    int wrong = 0;
    for (int i = 0; i < GROUP; ++i) {
        const float n = nearest_whole(w[i] * inverse);
        wrong += !((n >= -most) & (n <= top) & (n * scale == w[i]));
    }
    return !wrong;
}

// The largest magnitude of `count` weights; NaN where one is infinite or NaN.
inline float peak_of(const float* w, int count = GROUP) {
    uint32_t top = 0;  // magnitudes are ordered as their bits are
    for (int i = 0; i < count; ++i) {
        uint32_t bits; memcpy(&bits, w + i, 4);
        top = std::max(top, bits & 0x7fffffffu);
    }
    if (top >= 0x7f800000u) return NAN;
    float most; memcpy(&most, &top, 4);
    return most;
}

// The scale of a group of 4-bit weights, NaN if there is none.  The largest magnitude is 8 to 1 scales; the sign of the
// scale is the one for which the code -8 is enough.
inline float find_scale_4(const float* w) {
    const float most = peak_of(w);
    if (!(most > 0.f)) return most;
    const float top = std::find(w, w + GROUP, most) != w + GROUP ? most : -most;
    for (int n = 8; n >= 1; --n)
        for (float scale : {top / float(-n), top / float(n)})
            if (is_exact(w, scale, 8.f, 7.f)) return scale;
    return NAN;
}

// The scale of a group of 8-bit weights: its largest magnitude is 127 scales, or 16 (Q5_0) to 1, if all weights are whole
// multiples of that scale.  Otherwise `found` becomes false, and the scale is the least sufficient half for 127.
inline float find_scale_8(const float* w, bool& found) {
    const float most = peak_of(w);
    if (!(most > 0.f)) return most;
    for (float n = 127.f; n >= 1.f; n = n > 16.f ? 16.f : n - 1.f)
        if (is_exact(w, most / n, 127.f, 127.f)) return most / n;
    found = false;
    return widen_half(half_above(most / 127.f));
}

// Whether a group equals code * scale + least for codes 0 .. levels, up to `error`.
inline bool is_exact(const float* w, Scale s, float levels, float error) {
    const float inverse = 1.f / s.scale;
    int wrong = 0;
    for (int i = 0; i < GROUP; ++i) {
        const float n = nearest_whole((w[i] - s.least) * inverse);
        wrong += !((n >= 0.f) & (n <= levels) & (std::fabs(n * s.scale + s.least - w[i]) <= error));
    }
    return !wrong;
}

// The scale and least weight of a group in a shifted format; NaN if there are none.  The largest weight minus the smallest
// is 1 to `levels` scales.  Q4_1 and Q5_1 are recognised exactly; Q4_K and Q5_K, whose scales are products of a half and an
// integer, up to a 32nd of a scale.
inline Scale find_shifted_scale(const float* w, int levels) {
    float low = w[0], high = w[0];
    for (int i = 0; i < GROUP; ++i) {
        if (!std::isfinite(w[i])) return {NAN, NAN};
        low = std::fmin(low, w[i]), high = std::fmax(high, w[i]);
    }
    const auto halved = [](float x) { return widen_half(half(x)); };
    const float rounding = std::fabs(low) / 2048.f;  // of the least weight to a half, at most
    if (low == high) return std::fabs(halved(low) - low) <= rounding ? Scale{0.f, halved(low)} : Scale{NAN, NAN};
    const auto near = [&](int n) { return Scale{halved((high - low) / float(n)), halved(low)}; };
    const auto is_near = [&](Scale s, float error) { return s.scale != 0.f && is_exact(w, s, float(levels), error); };
    for (int n = levels; n >= 1; --n) {
        const float scale = near(n).scale;
        if (!is_near(near(n), scale / 32.f + rounding)) continue;
        for (int first = 0; first <= levels - n; ++first) {
            const Scale exact{scale, halved(low - float(first) * scale)};
            if (is_exact(w, exact, float(levels), 0.f)) return exact;
        }
    }
    for (int n = levels; n >= 1; --n)
        if (is_near(near(n), near(n).scale / 32.f)) return near(n);
    return {NAN, NAN};
}

// Writes the codes [group_inputs(format)] of column `c` of a block's group, with what the format adds to them, and the scale.
INLINE void write_column(const uint8_t* codes, Scale s, int format, int c, uint8_t* group) {
    fp16* scales = (fp16*)(group + code_bytes(format));
    scales[c] = s.scale == s.scale ? half(s.scale) : NAN_HALF;
    if (is_shifted(format)) scales[COLUMNS + c] = half(s.least);
    if (is_8_bit(format))
        for (int u = 0; u < group_inputs(format) / 4; ++u) memcpy(group + (u * COLUMNS + c) * 4, codes + 4 * u, 4);
    else
        for (int u = 0; u < GROUP / 8; ++u) {
            uint32_t low, high; memcpy(&low, codes + 8 * u, 4); memcpy(&high, codes + 8 * u + 4, 4);
            const uint32_t both = low | high << 4;
            memcpy(group + (u * COLUMNS + c) * 4, &both, 4);
        }
}

constexpr int added_to_codes(int format) { return format == INT8 || format == INT8_WIDE ? 128 : format == INT4 ? 8 : 0; }

// Packs column `c` of a block's group: codes and scale.
inline void pack_column(const float* w, Scale s, int format, int c, uint8_t* group) {
    const float inverse = s.scale * s.scale > 0.f ? 1.f / s.scale : 0.f, least = is_shifted(format) ? s.least : 0.f;
    uint8_t codes[WIDE];
    for (int i = 0; i < group_inputs(format); ++i)
        codes[i] = uint8_t(int(inverse != 0.f ? nearest_whole((w[i] - least) * inverse) : 0.f) + added_to_codes(format));
    write_column(codes, s, format, c, group);
}

// What find_scale_4, find_scale_8 or find_shifted_scale would find in the floats of a stored group, where that follows from
// its codes; `sign` is that of the codes to be packed.  Otherwise false: then the floats must be searched.
INLINE bool know_scale(int kind, const StoredGroup& g, int format, float unit, Scale& found, int& sign) {
    int8_t low = g.codes[0], high = low;  // in bytes, of which a register has most
    for (int i = 1; i < GROUP; ++i) low = std::min(low, g.codes[i]);
    for (int i = 1; i < GROUP; ++i) high = std::max(high, g.codes[i]);
    const auto any = [&](auto is) {
        int8_t found = 0;
        for (int i = 0; i < GROUP; ++i) found |= int8_t(is(g.codes[i]));
        return found != 0;
    };
    const float scale = g.scales[0], size = std::fabs(scale);
    sign = 1;
    if (format == INT4 && kind == Q4_0) {
        found = {scale, 0.f};
        if (size == 0.f) return false;
        if (low == -8) return true;  // 8 scales are tried first, with the sign for which -8 is enough
        // 7 scales are tried after 8, which are exact only for codes of 0 and of +-7.  The largest weight becomes -7.
        if (std::max<int>(-low, high) != 7 || !any([](int8_t code) { return (code != 0) & (code != 7) & (code != -7); })) return false;
        const bool has_positive = scale > 0.f ? high == 7 : low == -7;
        sign = has_positive == (scale > 0.f) ? -1 : 1;
        found.scale = scale * float(sign);
        return true;
    }
    if (format == INT8 && (kind == Q8_0 || kind == Q5_0)) {
        found = {size / unit, 0.f};  // the search tries 127 scales first, then 16
        sign = scale < 0.f ? -1 : 1;
        if (size == 0.f || widen_half(half(found.scale)) != found.scale) return false;
        if (kind == Q8_0) return low >= -127 && std::max<int>(-low, high) == 127;
        return low == -16 && any([](int8_t code) { return (code & 15) != 0; });
    }
    const int levels = kind == Q4_1 || kind == Q4_K ? 15 : 31;
    if (!has_least(kind) || format != (levels == 15 ? INT4_SHIFTED : INT8_SHIFTED)) return false;
    // All levels are tried first.  Fewer fit only codes that are whole multiples of a larger scale, up to a 32nd of it: not
    // if one of 15 levels has no divisor in common with 15, or if two of 31 are not each other's distance from the ends.
    if (low != 0 || high != levels || !(scale >= 0x1p-14f) || !(std::fabs(g.least) <= 32.f * scale)) return false;
    int8_t one = 0;
    for (int i = 0; i < GROUP; ++i)
        if (g.codes[i] != 0 && g.codes[i] != levels) one = g.codes[i];
    const bool is_full = levels == 15 ? any([](int code) { return code % 3 != 0 && code % 5 != 0; })
                                      : any([&](int8_t code) { return (code != 0) & (code != 31) & (code != one) & (code != 31 - one); });
    if (!is_full) return false;
    const float bottom = g.least + 0.f, top = float(levels) * scale + g.least;  // -0 becomes 0, as in the numbers
    found = {widen_half(half((top - bottom) / float(levels))), widen_half(half(bottom))};
    return found.scale != 0.f;
}

// Packs a stored group as column `c`, if its scale is known without a search.
INLINE bool pack_known(int kind, const StoredGroup& g, int format, float unit, int c, uint8_t* group) {
    Scale s;
    int sign;
    if (!know_scale(kind, g, format, unit, s, sign)) return false;
    uint8_t codes[GROUP];
    const uint8_t added = uint8_t(added_to_codes(format));
    if (sign > 0) for (int i = 0; i < GROUP; ++i) codes[i] = uint8_t(uint8_t(g.codes[i]) + added);
    else for (int i = 0; i < GROUP; ++i) codes[i] = uint8_t(added - uint8_t(g.codes[i]));
    write_column(codes, s, format, c, group);
    return true;
}

// Packs weights in a narrow format.  Returns whether all groups are stored exactly.  INT8 takes any weights, with scales in
// `unit`.  With `only_found`, and always in the other formats, a group that is not exact ends the packing, and the output
// is invalid.
inline bool pack_narrow(const Source& source, int outputs, int inputs, int k, int format, float unit, bool only_found,
                        uint8_t* out) {
    const size_t bytes = group_bytes(format);
    const float divided = format == INT8 ? 1.f / unit : 1.f;  // exact: a power of two
    bool found = true;
    for (int b = 0; b < outputs / COLUMNS; ++b)
        for (int g = 0; g < k / GROUP; ++g, out += bytes)
            for (int c = 0; c < COLUMNS; ++c) {
                const uint8_t* row = source.rows[b * COLUMNS + c];
                const int kind = source.kinds[b * COLUMNS + c];
                float w[GROUP];
                const int left = row ? inputs - g * GROUP : 0;
                if (left >= GROUP && kind != FLOATS) {
                    StoredGroup stored;
                    read_group(kind, row, g, stored);
                    if (pack_known(kind, stored, format, unit, c, out)) continue;
                    widen_group(kind, stored, w);
                    for (int i = 0; i < GROUP; ++i) w[i] *= divided;
                } else if (left >= GROUP) {
                    const float* weights = (const float*)row + size_t(g) * GROUP;
                    for (int i = 0; i < GROUP; ++i) w[i] = weights[i] * divided;
                } else {  // repeat the last weight of a row: the padding inputs are zeros
                    for (int i = 0; i < GROUP; ++i)
                        w[i] = left > 0 ? ((const float*)row)[g * GROUP + std::min(i, left - 1)] * divided : 0.f;
                }
                Scale s{0.f, 0.f};
                if (format == INT8) s.scale = find_scale_8(w, found);
                else if (format == INT4) s.scale = find_scale_4(w);
                else s = find_shifted_scale(w, format == INT4_SHIFTED ? 15 : 31);
                if (s.scale != s.scale && format != INT8) return false;  // in INT8 a scale that is NaN makes the output NaN
                if (only_found && !found) return false;
                pack_column(w, s, format, c, out);
            }
    return found;
}

// Packs weights as INT8_WIDE, which rounds them; scales in `unit`.
inline void pack_wide(const Source& source, int outputs, int inputs, int k, float unit, uint8_t* out) {
    const float divided = 1.f / unit;  // exact: a power of two
    for (int b = 0; b < outputs / COLUMNS; ++b)
        for (int first = 0; first < k; first += WIDE, out += group_bytes(INT8_WIDE))
            for (int c = 0; c < COLUMNS; ++c) {
                const uint8_t* row = source.rows[b * COLUMNS + c];
                const int kind = source.kinds[b * COLUMNS + c], left = row ? std::min(inputs - first, WIDE) : 0;
                float w[WIDE] = {};
                if (kind == FLOATS && left > 0) memcpy(w, row + sizeof(float) * first, sizeof(float) * left);
                else for (int i = 0; i < left; i += GROUP) load_group(kind, row, (first + i) / GROUP, w + i);
                for (int i = 0; i < left; ++i) w[i] *= divided;
                const float most = peak_of(w, WIDE);
                pack_column(w, {most > 0.f ? widen_half(half_above(most / 127.f)) : most, 0.f}, INT8_WIDE, c, out);
            }
}
