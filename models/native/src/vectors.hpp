// One register of floats, and what the kernels do with it, for each instruction set.
//
// The compiler's flags decide which of the branches is compiled: the whole library is compiled
// once for every instruction set (see build.py), so nothing here is chosen at run time.  Sums over the lanes of a
// register have one fixed order each, hence a result never depends on what is computed beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define POLYHEAD_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define POLYHEAD_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda

using bf16 = uint16_t;  // the upper half of a float
using fp16 = uint16_t;  // IEEE half precision

// for (int i = 0; i < N; ++i) f(i), with i a constant: arrays indexed by it stay in registers.
template <class F, int... I>
INLINE void unrolled_(F& f, std::integer_sequence<int, I...>) { (f(std::integral_constant<int, I>{}), ...); }
template <int N, class F>
INLINE void unrolled(F&& f) { unrolled_(f, std::make_integer_sequence<int, N>{}); }
#define NOT_UNROLLED _Pragma("GCC unroll 1")
#define UNROLL(N, i, ...) unrolled<N>([&](auto i) INLINED { __VA_ARGS__; })

INLINE float widen(bf16 x) { uint32_t bits = uint32_t(x) << 16; float out; memcpy(&out, &bits, 4); return out; }
INLINE float widen_half(fp16 h) {  // the exponent by a product, so that subnormal numbers are right too
    uint32_t bits = uint32_t(h & 0x7fff) << 13;
    float x; memcpy(&x, &bits, 4);
    x = (h & 0x7c00) == 0x7c00 ? NAN : x * 0x1p112f;  // no scale is infinite
    return h & 0x8000 ? -x : x;
}
INLINE bf16 narrow(float x) {  // to the nearest, ties to even; a NaN stays one
    uint32_t bits; memcpy(&bits, &x, 4);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    return bf16((x != x ? bits | 0x400000 : rounded) >> 16);  // no branch, so that a loop of these is vectorised
}

#if defined(POLYHEAD_AVX512)

constexpr int LANES = 16, REGISTERS = 32;
constexpr bool FUSED_DOT = true;  // four products are added by one instruction; otherwise gcc keeps all of a loop for later
using Floats = __m512;
using Ints = __m512i;

INLINE Floats zero() { return _mm512_setzero_ps(); }
INLINE Floats all(float x) { return _mm512_set1_ps(x); }
INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
INLINE void store_past_cache(float* p, Floats x) { _mm512_stream_ps(p, x); }
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats quotient(Floats a, Floats b) { return _mm512_div_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats largest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats magnitude(Floats a) { return _mm512_abs_ps(a); }
INLINE Floats nearest(Floats a) { return _mm512_roundscale_ps(a, 8); }
INLINE Floats shifted(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }  // x 2^n, n whole
INLINE Floats signed_as(Floats a, Floats sign) {
    return _mm512_or_ps(a, _mm512_and_ps(sign, _mm512_set1_ps(-0.f)));
}
INLINE float sum(Floats a) { return _mm512_reduce_add_ps(a); }
// The sums of four, to out[0 .. 4).
INLINE void store_sums(float* out, Floats a, Floats b, Floats c, Floats d) {
    Floats ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    Floats cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    Floats x = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
// The largest lanes of four, to out[0 .. 4).
INLINE void store_peaks(float* out, Floats a, Floats b, Floats c, Floats d) {
    Floats ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    Floats cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    Floats x = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
INLINE float highest(Floats a) { return _mm512_reduce_max_ps(a); }
INLINE bool is_nan(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE Floats first(Floats a, int n, float rest) {  // the first n lanes of a
    return _mm512_mask_mov_ps(_mm512_set1_ps(rest), __mmask16((1u << n) - 1), a);
}
INLINE Floats past(Floats a, int n, float rest) {  // a without its first n lanes
    return _mm512_mask_mov_ps(_mm512_set1_ps(rest), __mmask16(~((1u << n) - 1)), a);
}
// Of lane i what a has where bit i is 1.
INLINE Floats where(uint32_t bits, Floats a, float rest) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(rest), __mmask16(bits), a);
}
INLINE Floats if_at_least(Floats a, Floats b, Floats c) {  // a where b >= c, else 0
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(b, c, _CMP_GE_OQ), a);
}
INLINE bool any_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE Floats load_halves(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

INLINE Ints all_ints(int x) { return _mm512_set1_epi32(x); }
INLINE Ints load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE Ints low_codes(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE Ints high_codes(Ints x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
// Four products of an unsigned and a signed byte to each lane.  As assembler: gcc 12 spills the intrinsic's accumulators.
struct Four { Ints x; };
INLINE Four four(const int8_t* p) { int x; memcpy(&x, p, 4); return {_mm512_set1_epi32(x)}; }
INLINE Ints dot(Ints sum, Ints codes, Four x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x.x));
    return sum;
}
// The nearest whole numbers as signed bytes, and their sum to each lane of `sum`.
INLINE void store_codes(int8_t* p, Floats x, Ints& sum) {
    Ints n = _mm512_cvtps_epi32(x);
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(n));
    sum = _mm512_add_epi32(sum, n);
}
INLINE int sum_ints(Ints a) {  // wraps around, as the other additions do; the compiler's own reduction may not overflow
    __m256i y = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
INLINE void store_int_sums(int32_t* out, Ints a, Ints b, Ints c, Ints d) {
    Ints ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    Ints cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    Ints x = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i y = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    _mm_storeu_si128((__m128i*)out, _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}
// Two products of signed 16-bit numbers to each lane.
struct Two { Ints x; };
INLINE Two two(const int16_t* p) { int x; memcpy(&x, p, 4); return {_mm512_set1_epi32(x)}; }
INLINE Ints dot(Ints sum, Ints codes, Two x) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x.x));
    return sum;
}
// The nearest whole numbers as signed 16-bit numbers.
INLINE void store_wide_codes(int16_t* p, Floats x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
// The nearest whole numbers, 0 to 16,383, as two digits of 7 bits, and their sum to each lane of `sum`.
INLINE void store_digits(int8_t* high, int8_t* low, Floats x, Ints& sum) {
    Ints n = _mm512_cvtps_epi32(x);
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(_mm512_srli_epi32(n, 7)));
    _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(_mm512_and_si512(n, _mm512_set1_epi32(127))));
    sum = _mm512_add_epi32(sum, n);
}
INLINE Ints of_digits(Ints high, Ints low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 7), low); }
// The nearest whole numbers, -127 to 127, plus 128: each to byte `which` of four.
INLINE void store_fourth(uint8_t* p, int which, Floats x) {
    const Ints n = _mm512_xor_si512(_mm512_cvtps_epi32(x), _mm512_set1_epi32(128));
    _mm512_mask_storeu_epi8(p, 0x1111111111111111ull << which, _mm512_sll_epi32(n, _mm_cvtsi32_si128(8 * which)));
}

#elif defined(POLYHEAD_AVX2)

constexpr int LANES = 8, REGISTERS = 16;
using Floats = __m256;
using Ints = __m256i;

INLINE Floats zero() { return _mm256_setzero_ps(); }
INLINE Floats all(float x) { return _mm256_set1_ps(x); }
INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
INLINE void store_past_cache(float* p, Floats x) { _mm256_stream_ps(p, x); }
INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats quotient(Floats a, Floats b) { return _mm256_div_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats largest(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Floats magnitude(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), a); }
INLINE Floats nearest(Floats a) { return _mm256_round_ps(a, 8); }
INLINE Floats shifted(Floats x, Floats n) {
    Ints power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
}
INLINE Floats signed_as(Floats a, Floats sign) { return _mm256_or_ps(a, _mm256_and_ps(sign, _mm256_set1_ps(-0.f))); }
INLINE float sum(Floats a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
INLINE void store_sums(float* out, Floats a, Floats b, Floats c, Floats d) {
    Floats ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    Floats cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    Floats x = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
INLINE void store_peaks(float* out, Floats a, Floats b, Floats c, Floats d) {
    Floats ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    Floats cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    Floats x = _mm256_max_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
INLINE float highest(Floats a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
INLINE bool is_nan(Floats a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
INLINE __m256 below(int n) {
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}
INLINE Floats first(Floats a, int n, float rest) { return _mm256_blendv_ps(_mm256_set1_ps(rest), a, below(n)); }
INLINE Floats past(Floats a, int n, float rest) { return _mm256_blendv_ps(a, _mm256_set1_ps(rest), below(n)); }
INLINE Floats where(uint32_t bits, Floats a, float rest) {
    const Ints lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const Ints set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lanes), lanes);
    return _mm256_blendv_ps(_mm256_set1_ps(rest), a, _mm256_castsi256_ps(set));
}
INLINE Floats if_at_least(Floats a, Floats b, Floats c) { return _mm256_and_ps(a, _mm256_cmp_ps(b, c, _CMP_GE_OQ)); }
INLINE bool any_at_least(Floats a, Floats b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
INLINE Floats load_halves(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

INLINE Ints all_ints(int x) { return _mm256_set1_epi32(x); }
INLINE Ints load_codes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE Ints low_codes(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE Ints high_codes(Ints x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
INLINE Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
#if defined(__AVXVNNI__)
constexpr bool FUSED_DOT = true;
struct Four { Ints x; };
INLINE Four four(const int8_t* p) { int x; memcpy(&x, p, 4); return {_mm256_set1_epi32(x)}; }
INLINE Ints dot(Ints sum, Ints codes, Four x) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(x.x));
    return sum;
}
#else
constexpr bool FUSED_DOT = false;
// vpmaddubsw would saturate: bytes are widened, the even and the odd ones apart.
struct Four { Ints even, odd; };
INLINE Four four(const int8_t* p) {
    int x; memcpy(&x, p, 4);
    Ints both = _mm256_set1_epi32(x);
    return {_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8), _mm256_srai_epi16(both, 8)};
}
INLINE Ints dot(Ints sum, Ints codes, Four x) {
    Ints even = _mm256_and_si256(codes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(codes, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, x.even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, x.odd));
}
#endif
INLINE void store_bytes(int8_t* p, Ints n) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
INLINE void store_codes(int8_t* p, Floats x, Ints& sum) {
    Ints n = _mm256_cvtps_epi32(x);
    store_bytes(p, n);
    sum = _mm256_add_epi32(sum, n);
}
INLINE void store_digits(int8_t* high, int8_t* low, Floats x, Ints& sum) {
    Ints n = _mm256_cvtps_epi32(x);
    store_bytes(high, _mm256_srli_epi32(n, 7));
    store_bytes(low, _mm256_and_si256(n, _mm256_set1_epi32(127)));
    sum = _mm256_add_epi32(sum, n);
}
INLINE Ints of_digits(Ints high, Ints low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 7), low); }
INLINE int sum_ints(Ints a) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
INLINE void store_int_sums(int32_t* out, Ints a, Ints b, Ints c, Ints d) {
    Ints ab = _mm256_hadd_epi32(a, b), cd = _mm256_hadd_epi32(c, d), x = _mm256_hadd_epi32(ab, cd);
    _mm_storeu_si128((__m128i*)out, _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
struct Two { Ints x; };
INLINE Two two(const int16_t* p) { int x; memcpy(&x, p, 4); return {_mm256_set1_epi32(x)}; }
#if defined(__AVXVNNI__)
INLINE Ints dot(Ints sum, Ints codes, Two x) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(x.x));
    return sum;
}
#else
INLINE Ints dot(Ints sum, Ints codes, Two x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(codes, x.x)); }
#endif
INLINE void store_wide_codes(int16_t* p, Floats x) {
    Ints n = _mm256_cvtps_epi32(x);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1)));
}

#elif defined(__aarch64__)

constexpr int LANES = 4, REGISTERS = 32;
using Floats = float32x4_t;
using Ints = int32x4_t;

INLINE Floats zero() { return vdupq_n_f32(0.f); }
INLINE Floats all(float x) { return vdupq_n_f32(x); }
INLINE Floats load(const float* p) { return vld1q_f32(p); }
INLINE void store(float* p, Floats x) { vst1q_f32(p, x); }
INLINE void store_past_cache(float* p, Floats x) { store(p, x); }
INLINE Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
INLINE Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
INLINE Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
INLINE Floats quotient(Floats a, Floats b) { return vdivq_f32(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
INLINE Floats largest(Floats a, Floats b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // fmax would keep another NaN
INLINE Floats least(Floats a, Floats b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE Floats magnitude(Floats a) { return vabsq_f32(a); }
INLINE Floats nearest(Floats a) { return vrndnq_f32(a); }
INLINE Floats shifted(Floats x, Floats n) {
    return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23)));
}
INLINE Floats signed_as(Floats a, Floats sign) {
    const uint32x4_t bit = vandq_u32(vreinterpretq_u32_f32(sign), vdupq_n_u32(0x80000000));
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(a), bit));
}
INLINE float sum(Floats a) { return vaddvq_f32(a); }
INLINE void store_sums(float* out, Floats a, Floats b, Floats c, Floats d) {
    store(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
INLINE float highest(Floats a) {
    const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
INLINE void store_peaks(float* out, Floats a, Floats b, Floats c, Floats d) {
    const Floats ab = largest(vuzp1q_f32(a, b), vuzp2q_f32(a, b)), cd = largest(vuzp1q_f32(c, d), vuzp2q_f32(c, d));
    store(out, largest(vuzp1q_f32(ab, cd), vuzp2q_f32(ab, cd)));
}
INLINE bool is_nan(Floats a) { return !vminvq_u32(vceqq_f32(a, a)); }
INLINE uint32x4_t below(int n) { return vcltq_s32(Ints{0, 1, 2, 3}, vdupq_n_s32(n)); }
INLINE Floats first(Floats a, int n, float rest) { return vbslq_f32(below(n), a, all(rest)); }
INLINE Floats past(Floats a, int n, float rest) { return vbslq_f32(below(n), all(rest), a); }
INLINE Floats where(uint32_t bits, Floats a, float rest) {
    return vbslq_f32(vtstq_s32(vdupq_n_s32(int(bits)), Ints{1, 2, 4, 8}), a, all(rest));
}
INLINE Floats if_at_least(Floats a, Floats b, Floats c) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vcgeq_f32(b, c)));
}
INLINE bool any_at_least(Floats a, Floats b) { return vmaxvq_u32(vcgeq_f32(a, b)); }
INLINE Floats load_halves(const fp16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

INLINE Ints all_ints(int x) { return vdupq_n_s32(x); }
INLINE Ints load_codes(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
INLINE Ints low_codes(Ints x) { return vandq_s32(x, vdupq_n_s32(0x0f0f0f0f)); }
INLINE Ints high_codes(Ints x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); }
INLINE Ints add_ints(Ints a, Ints b) { return vaddq_s32(a, b); }
INLINE Floats to_floats(Ints a) { return vcvtq_f32_s32(a); }
INLINE int8x8_t four_bytes(const int8_t* p) { int32_t x; memcpy(&x, p, 4); return vreinterpret_s8_s32(int32x2_t{x, 0}); }
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool FUSED_DOT = true;
struct Four { int8x8_t x; };
INLINE Four four(const int8_t* p) { return {four_bytes(p)}; }
INLINE Ints dot(Ints sum, Ints codes, Four x) { return vusdotq_lane_s32(sum, vreinterpretq_u8_s32(codes), x.x, 0); }
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool FUSED_DOT = true;
// There are no products of unsigned with signed bytes: codes are taken less 128, and what that takes off is added again.
struct Four { int8x8_t x; Ints taken; };  // taken: -128 times the sum of the bytes
INLINE Four four(const int8_t* p) {
    const int8x8_t x = four_bytes(p);
    return {x, vdotq_lane_s32(vdupq_n_s32(0), vdupq_n_s8(-128), x, 0)};
}
INLINE Ints dot(Ints sum, Ints codes, Four x) {
    const int8x16_t less = vreinterpretq_s8_s32(veorq_s32(codes, vdupq_n_s32(int(0x80808080))));
    return vdotq_lane_s32(vsubq_s32(sum, x.taken), less, x.x, 0);
}
#else
constexpr bool FUSED_DOT = false;
struct Four { int16x8_t x; };  // the four, twice
INLINE Four four(const int8_t* p) {
    const int16x4_t x = vget_low_s16(vmovl_s8(four_bytes(p)));
    return {vcombine_s16(x, x)};
}
INLINE Ints dot(Ints sum, Ints codes, Four x) {
    const uint8x16_t bytes = vreinterpretq_u8_s32(codes);
    const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
    const int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(bytes));
    const Ints a = vpaddq_s32(vmull_s16(vget_low_s16(low), vget_low_s16(x.x)), vmull_high_s16(low, x.x));
    const Ints b = vpaddq_s32(vmull_s16(vget_low_s16(high), vget_low_s16(x.x)), vmull_high_s16(high, x.x));
    return vaddq_s32(sum, vpaddq_s32(a, b));
}
#endif
INLINE void store_bytes(int8_t* p, Ints n) {  // as 127 or -128 where they do not fit
    const int16x4_t words = vqmovn_s32(n);
    const int32_t bytes = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
    memcpy(p, &bytes, 4);
}
INLINE void store_codes(int8_t* p, Floats x, Ints& sum) {
    const Ints n = vcvtnq_s32_f32(x);
    store_bytes(p, n);
    sum = vaddq_s32(sum, n);
}
INLINE int sum_ints(Ints a) { return vaddvq_s32(a); }
INLINE void store_int_sums(int32_t* out, Ints a, Ints b, Ints c, Ints d) {
    vst1q_s32(out, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)));
}
struct Two { int16x8_t x; };  // the two, four times
INLINE Two two(const int16_t* p) { int x; memcpy(&x, p, 4); return {vreinterpretq_s16_s32(vdupq_n_s32(x))}; }
INLINE Ints dot(Ints sum, Ints codes, Two x) {
    const int16x8_t c = vreinterpretq_s16_s32(codes);
    return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(c), vget_low_s16(x.x)), vmull_high_s16(c, x.x)));
}
INLINE void store_wide_codes(int16_t* p, Floats x) { vst1_s16(p, vqmovn_s32(vcvtnq_s32_f32(x))); }
INLINE void store_digits(int8_t* high, int8_t* low, Floats x, Ints& sum) {
    const Ints n = vcvtnq_s32_f32(x);
    store_bytes(high, vshrq_n_s32(n, 7));
    store_bytes(low, vandq_s32(n, vdupq_n_s32(127)));
    sum = vaddq_s32(sum, n);
}
INLINE Ints of_digits(Ints high, Ints low) { return vaddq_s32(vshlq_n_s32(high, 7), low); }

#else  // any processor: four lanes, as the compiler will have them

constexpr int LANES = 4, REGISTERS = 16;
constexpr bool FUSED_DOT = false;
using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));

INLINE Floats zero() { return Floats{}; }
INLINE Floats all(float x) { return Floats{x, x, x, x}; }
INLINE Floats load(const float* p) { Floats x; memcpy(&x, p, sizeof x); return x; }
INLINE void store(float* p, Floats x) { memcpy(p, &x, sizeof x); }
INLINE void store_past_cache(float* p, Floats x) { store(p, x); }
INLINE Floats add(Floats a, Floats b) { return a + b; }
INLINE Floats sub(Floats a, Floats b) { return a - b; }
INLINE Floats mul(Floats a, Floats b) { return a * b; }
INLINE Floats quotient(Floats a, Floats b) { return a / b; }
INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE Floats largest(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats least(Floats a, Floats b) { return a < b ? a : b; }
INLINE Floats magnitude(Floats a) { return Floats(Ints(a) & 0x7fffffff); }
INLINE Floats nearest(Floats a) { for (int i = 0; i < LANES; ++i) a[i] = std::nearbyintf(a[i]); return a; }
INLINE Floats shifted(Floats x, Floats n) { return x * Floats((__builtin_convertvector(n, Ints) + 127) << 23); }
INLINE Floats signed_as(Floats a, Floats sign) { return Floats(Ints(a) | (Ints(sign) & int(0x80000000))); }
INLINE float sum(Floats a) { return (a[0] + a[2]) + (a[1] + a[3]); }
INLINE void store_sums(float* out, Floats a, Floats b, Floats c, Floats d) {
    out[0] = sum(a); out[1] = sum(b); out[2] = sum(c); out[3] = sum(d);
}
INLINE float highest(Floats a) {
    float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
INLINE void store_peaks(float* out, Floats a, Floats b, Floats c, Floats d) {
    out[0] = highest(a); out[1] = highest(b); out[2] = highest(c); out[3] = highest(d);
}
INLINE bool is_nan(Floats a) { return a[0] != a[0] || a[1] != a[1] || a[2] != a[2] || a[3] != a[3]; }
INLINE Floats first(Floats a, int n, float rest) { for (int i = n; i < LANES; ++i) a[i] = rest; return a; }
INLINE Floats past(Floats a, int n, float rest) { for (int i = 0; i < n && i < LANES; ++i) a[i] = rest; return a; }
INLINE Floats where(uint32_t bits, Floats a, float rest) {
    for (int i = 0; i < LANES; ++i) a[i] = bits >> i & 1 ? a[i] : rest;
    return a;
}
INLINE Floats if_at_least(Floats a, Floats b, Floats c) { return Floats(Ints(a) & Ints(b >= c)); }
INLINE bool any_at_least(Floats a, Floats b) { return a[0] >= b[0] || a[1] >= b[1] || a[2] >= b[2] || a[3] >= b[3]; }
INLINE Floats load_halves(const fp16* p) {
    Floats out;
    for (int i = 0; i < LANES; ++i) out[i] = widen_half(p[i]);
    return out;
}

INLINE Ints all_ints(int x) { return Ints{x, x, x, x}; }
INLINE Ints load_codes(const uint8_t* p) { Ints x; memcpy(&x, p, sizeof x); return x; }
INLINE Ints low_codes(Ints x) { return x & 0x0f0f0f0f; }
INLINE Ints high_codes(Ints x) { return x >> 4 & 0x0f0f0f0f; }
INLINE Ints add_ints(Ints a, Ints b) { return a + b; }
INLINE Floats to_floats(Ints a) { return __builtin_convertvector(a, Floats); }
struct Four { int x[4]; };
INLINE Four four(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
INLINE Ints dot(Ints sum, Ints codes, Four x) {
    return sum + (codes & 255) * x.x[0] + (codes >> 8 & 255) * x.x[1] + (codes >> 16 & 255) * x.x[2] +
           (codes >> 24 & 255) * x.x[3];
}
INLINE void store_codes(int8_t* p, Floats x, Ints& sum) {
    x = largest(x, all(-128.f));  // a number that is none too: it has no whole number
    x = least(x, all(127.f));
    for (int i = 0; i < LANES; ++i) {
        int n = int(std::nearbyintf(x[i]));
        p[i] = int8_t(n);
        sum[i] += n;
    }
}
INLINE int sum_ints(Ints a) { return int(unsigned(a[0]) + unsigned(a[1]) + unsigned(a[2]) + unsigned(a[3])); }
INLINE void store_int_sums(int32_t* out, Ints a, Ints b, Ints c, Ints d) {
    out[0] = sum_ints(a); out[1] = sum_ints(b); out[2] = sum_ints(c); out[3] = sum_ints(d);
}
struct Two { int x[2]; };
INLINE Two two(const int16_t* p) { return {{p[0], p[1]}}; }
INLINE Ints dot(Ints sum, Ints codes, Two x) { return sum + (codes << 16 >> 16) * x.x[0] + (codes >> 16) * x.x[1]; }
INLINE void store_wide_codes(int16_t* p, Floats x) {
    x = least(largest(x, all(-8191.f)), all(8191.f));  // a number that is none too: 32 products of two fit 32 bits
    for (int i = 0; i < LANES; ++i) p[i] = int16_t(std::nearbyintf(x[i]));
}
INLINE void store_digits(int8_t* high, int8_t* low, Floats x, Ints& sum) {
    x = largest(x, all(0.f));
    x = least(x, all(16383.f));
    for (int i = 0; i < LANES; ++i) {
        int n = int(std::nearbyintf(x[i]));
        high[i] = int8_t(n >> 7);
        low[i] = int8_t(n & 127);
        sum[i] += n;
    }
}
INLINE Ints of_digits(Ints high, Ints low) { return high * 128 + low; }

#endif

#if !defined(POLYHEAD_AVX512)
INLINE void store_fourth(uint8_t* p, int which, Floats x) {
    int8_t codes[LANES];
    Ints sum = all_ints(0);
    store_codes(codes, x, sum);
    for (int i = 0; i < LANES; ++i) p[4 * i + which] = uint8_t(codes[i] ^ 0x80);
}
#endif

// store_past_cache writes to memory without reading the line before; p is aligned to a register.  Other threads see what it
// wrote after complete_stores.
INLINE void complete_stores() {
#if defined(POLYHEAD_AVX512) || defined(POLYHEAD_AVX2)
    _mm_sfence();
#endif
}

// e^x (Cephes): relative error below 2e-7; x is brought into -87 .. 88, a NaN stays one.
INLINE Floats exponential(Floats x) {
    x = largest(all(-87.f), least(all(88.f), x));
    Floats n = nearest(mul(x, all(1.44269504f)));
    Floats r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, all(1.f)));
    return shifted(p, n);
}
// 2^x for x <= 0: relative error below 3e-7; x is brought to -126, a NaN stays one.
INLINE Floats binary_power(Floats x) {
    x = largest(all(-126.f), x);
    Floats n = nearest(x), r = sub(x, n);
    Floats p = all(1.3276472e-3f);
    p = fma(p, r, all(9.6755413e-3f));
    p = fma(p, r, all(5.5507133e-2f));
    p = fma(p, r, all(2.4022120e-1f));
    p = fma(p, r, all(6.9314697e-1f));
    p = fma(p, r, all(1.f));
    return shifted(p, n);
}
// tanh(x) (Cephes): relative error below 3e-7; a NaN stays one.
INLINE Floats hyperbolic_tangent(Floats x) {
    const Floats a = magnitude(x), s = least(all(.625f), a), z = mul(s, s);  // s: where the polynomial is used
    Floats p = all(-5.70498872745e-3f);
    p = fma(p, z, all(2.06390887954e-2f));
    p = fma(p, z, all(-5.37397155531e-2f));
    p = fma(p, z, all(1.33314422036e-1f));
    p = fma(p, z, all(-3.33332819422e-1f));
    p = fma(mul(p, z), s, s);
    const Floats far = sub(all(1.f), quotient(all(2.f), add(exponential(add(a, a)), all(1.f))));
    return signed_as(add(p, if_at_least(sub(far, p), a, all(.625f))), x);
}
// cap * tanh(x / cap).
INLINE Floats capped(Floats x, float cap) { return mul(hyperbolic_tangent(quotient(x, all(cap))), all(cap)); }
INLINE Floats logistic(Floats x) { return quotient(all(1.f), add(all(1.f), exponential(sub(zero(), x)))); }
INLINE Floats silu(Floats x) { return quotient(x, add(all(1.f), exponential(sub(zero(), x)))); }
// log(1 + e^x) = max(x, 0) + log(1 + z), z = e^-|x|, by the series of 2 artanh(z / (2 + z)): relative error below 3e-7; a NaN
// stays one.
INLINE Floats softplus(Floats x) {
    const Floats z = exponential(sub(zero(), magnitude(x))), w = quotient(z, add(all(2.f), z)), square = mul(w, w);
    Floats p = all(2.f / 13.f);
    p = fma(p, square, all(2.f / 11.f));
    p = fma(p, square, all(2.f / 9.f));
    p = fma(p, square, all(2.f / 7.f));
    p = fma(p, square, all(2.f / 5.f));
    p = fma(p, square, all(2.f / 3.f));
    p = fma(p, square, all(2.f));
    return fma(p, w, largest(zero(), x));
}
INLINE Floats relu(Floats x) { return largest(zero(), x); }
INLINE Floats relu_squared(Floats x) { x = relu(x); return mul(x, x); }
INLINE Floats gelu_sigmoid(Floats x) { return quotient(x, add(all(1.f), exponential(mul(x, all(-1.702f))))); }
// x * Phi(x), the error function by Abramowitz and Stegun 7.1.26: absolute error below 2e-7.
INLINE Floats gelu(Floats x) {
    Floats z = mul(x, all(0.70710678f)), a = magnitude(z);
    Floats t = quotient(all(1.f), fma(a, all(0.3275911f), all(1.f)));
    Floats p = all(1.061405429f);
    p = fma(p, t, all(-1.453152027f));
    p = fma(p, t, all(1.421413741f));
    p = fma(p, t, all(-0.284496736f));
    p = mul(fma(p, t, all(0.254829592f)), t);
    Floats erf = sub(all(1.f), mul(p, exponential(sub(zero(), mul(a, a)))));
    return mul(mul(x, all(.5f)), add(all(1.f), signed_as(erf, z)));
}
// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
INLINE Floats gelu_tanh(Floats x) {
    Floats u = mul(mul(x, all(0.7978845608f)), fma(mul(x, x), all(0.044715f), all(1.f)));
    return quotient(x, add(all(1.f), exponential(mul(u, all(-2.f)))));
}
