"""C++ of the vectors in which pass 2 computes, whatever elements are in memory.

GCC's and Clang's ``vector_size``: one operator is one instruction, and ``F`` and ``I`` have as many lanes as a register
has 32-bit values. Left to itself a compiler takes as many lanes as the narrowest type has: for one ``int8_t`` it
computes everything in four registers at once, and has none left. Only to read and to write memory are instructions
named, where two do what a compiler finds five for; other processors convert as the compiler finds best. No header of
the processor's is included: it takes five times as long to compile as a kernel.
"""

from typing import Final

#: What kernels of pass 2 begin with, after the conversions of single values.
VECTORS: Final = r"""
#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
#define INLINE static inline __attribute__((always_inline))
using F = float __attribute__((vector_size(4 * W)));
using I = int32_t __attribute__((vector_size(4 * W)));  // also of conditions: -1 where one holds
using U = uint32_t __attribute__((vector_size(4 * W)));
struct float16 { uint16_t bits; };
struct bfloat16 { uint16_t bits; };

template <class V, class T> INLINE V same(T value) { return value - V{}; }  // -0.0 is kept
INLINE I lanes() { I v; for (int k = 0; k < W; ++k) v[k] = k; return v; }
INLINE I shifted(I v, int by) { return I(U(v) >> by); }  // with zeros
INLINE I is_nonzero(F v) { return v != 0.0f; }
INLINE I is_nonzero(I v) { return v != 0; }
INLINE F size(F v) { return bits<F>(bits<I>(v) & 0x7FFFFFFF); }
INLINE I size(I v) { return v < 0 ? -v : v; }
INLINE F root(F v) { F r; for (int k = 0; k < W; ++k) r[k] = __builtin_sqrtf(v[k]); return r; }
INLINE F rounded(F v) { F r; for (int k = 0; k < W; ++k) r[k] = __builtin_rintf(v[k]); return r; }
#if defined(__AVX2__)
INLINE I to_int32(F v) { I r; __asm__("vcvttps2dq %1, %0" : "=v"(r) : "vm"(v)); return r; }
#else
INLINE I to_int32(F v) { I r; for (int k = 0; k < W; ++k) r[k] = to_int32(v[k]); return r; }
#endif
INLINE I to_int32(I v) { return v; }
INLINE F to_float(I v) { return __builtin_convertvector(v, F); }

// Memory: the W values at an address.
template <class T> using Memory = T[W];
template <class T> INLINE const Memory<T>& at(const T* from) { return *reinterpret_cast<const Memory<T>*>(from); }
template <class T> INLINE Memory<T>& at(T* to) { return *reinterpret_cast<Memory<T>*>(to); }
INLINE F read(const float* from) { F v; std::memcpy(&v, from, sizeof v); return v; }
INLINE I read(const int32_t* from) { I v; std::memcpy(&v, from, sizeof v); return v; }
INLINE void write(float* to, F v) { std::memcpy(to, &v, sizeof v); }
INLINE void write(int32_t* to, I v) { std::memcpy(to, &v, sizeof v); }

#if defined(__AVX2__)
#define READ(T, V, instruction) INLINE V read(const T* from) { \
    V v; __asm__(instruction " %1, %0" : "=v"(v) : "m"(at(from))); return v; }
#define READ_BITS(T, instruction) READ(T, I, instruction)
#else
#define READ_BITS(T, instruction) INLINE I read(const T* from) { \
    T v __attribute__((vector_size(W * sizeof(T)))); \
    std::memcpy(&v, from, sizeof v); return __builtin_convertvector(v, I); }
#endif
READ_BITS(int8_t, "vpmovsxbd")
READ_BITS(uint8_t, "vpmovzxbd")
READ_BITS(int16_t, "vpmovsxwd")
READ_BITS(uint16_t, "vpmovzxwd")
INLINE F read(const bfloat16* from) { return bits<F>(read(reinterpret_cast<const uint16_t*>(from)) << 16); }

#if defined(__AVX512F__)
#define WRITE(T, instruction) INLINE void write(T* to, I v) { \
    __asm__(instruction " %1, %0" : "=m"(at(to)) : "v"(v)); }
WRITE(int8_t, "vpmovdb")
WRITE(uint8_t, "vpmovdb")
WRITE(int16_t, "vpmovdw")
WRITE(uint16_t, "vpmovdw")
INLINE void write(bfloat16* to, F v) { write(reinterpret_cast<uint16_t*>(to), shifted(bits<I>(v), 16)); }
#elif defined(__AVX2__)
using X = int32_t __attribute__((vector_size(16)));
INLINE X upper(I v) { X r; __asm__("vextracti128 $1, %1, %0" : "=x"(r) : "x"(v)); return r; }
template <class T> INLINE void write16(T* to, X v) { __asm__("vmovdqu %1, %0" : "=m"(at(to)) : "x"(v)); }
template <class T> INLINE void write8(T* to, I v) {  // the first bytes of lanes: cut off, as a cast does
    const int32_t first = 0x0C080400;
    __asm__("vpshufb %2, %1, %0" : "=x"(v) : "x"(v), "xm"(I{first, -1, -1, -1, first, -1, -1, -1}));
    X r;
    __asm__("vpunpckldq %1, %x2, %0" : "=x"(r) : "x"(upper(v)), "x"(v));
    __asm__("vmovq %1, %0" : "=m"(at(to)) : "x"(r));
}
INLINE void write(int8_t* to, I v) { write8(to, v); }
INLINE void write(uint8_t* to, I v) { write8(to, v); }
INLINE void write(int16_t* to, I v) {  // all values fit
    X r;
    __asm__("vpackssdw %1, %x2, %0" : "=x"(r) : "x"(upper(v)), "x"(v));
    write16(to, r);
}
INLINE void write(uint16_t* to, I v) {
    X r;
    __asm__("vpackusdw %1, %x2, %0" : "=x"(r) : "x"(upper(v)), "x"(v));
    write16(to, r);
}
INLINE void write(bfloat16* to, F v) { write(reinterpret_cast<uint16_t*>(to), shifted(bits<I>(v), 16)); }
#else
#define WRITE(T) INLINE void write(T* to, I v) { \
    using Narrow = T __attribute__((vector_size(W * sizeof(T)))); \
    const Narrow narrow = __builtin_convertvector(v, Narrow); std::memcpy(to, &narrow, sizeof narrow); }
WRITE(int8_t)
WRITE(uint8_t)
WRITE(int16_t)
WRITE(uint16_t)
INLINE void write(bfloat16* to, F v) { write(reinterpret_cast<uint16_t*>(to), shifted(bits<I>(v), 16)); }
#endif

// FP16, exact both ways: what is written is on its grid, or beyond it and infinite.
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
READ(float16, F, "vcvtph2ps")
INLINE void write(float16* to, F v) { __asm__("vcvtps2ph $0, %1, %0" : "=m"(at(to)) : "v"(v)); }
INLINE F rounded_to_float16(F v) {
    using Half = int16_t __attribute__((vector_size(2 * W)));
    Half r;
    __asm__("vcvtps2ph $0, %1, %0" : "=v"(r) : "v"(v));
    __asm__("vcvtph2ps %1, %0" : "=v"(v) : "v"(r));
    return v;
}
#else
// Subnormals are integers · 2⁻²⁴, so that none is a subnormal of FP32's on the way, which a process may have set to
// count as zero.
INLINE F read(const float16* from) {
    const I pattern = read(reinterpret_cast<const uint16_t*>(from)), magnitude = pattern & 0x7FFF;
    const I normal = (magnitude << 13) + (magnitude < 0x7C00 ? same<I>(112 << 23) : same<I>(224 << 23));
    const I subnormal = bits<I>(to_float(magnitude) * 0x1p-24f);
    return bits<F>((magnitude < 0x0400 ? subnormal : normal) | ((pattern & 0x8000) << 16));
}
INLINE void write(float16* to, F v) {
    const I pattern = bits<I>(v), magnitude = pattern & 0x7FFFFFFF;
    const F small = magnitude < (113 << 23) ? bits<F>(magnitude) : F{};
    const I finite = magnitude < (113 << 23) ? to_int32(small * 0x1p24f) : (magnitude >> 13) - (112 << 10);
    const I others = magnitude > 0x7F800000 ? same<I>(0x7E00) : same<I>(0x7C00);
    const I magnitude16 = magnitude < (143 << 23) ? finite : others;
    write(reinterpret_cast<uint16_t*>(to), magnitude16 | (shifted(pattern, 16) & 0x8000));
}
// Next to `coarse` FP32's spacing is FP16's next to v, so that adding it rounds v to nearest even.
INLINE F rounded_to_float16(F v) {
    const F power = bits<F>(bits<I>(v) & 0x7F800000);
    const F coarse = (power < 0x1p-14f ? same<F>(0x1p-14f) : power > 0x1p16f ? same<F>(0x1p16f) : power) * 0x1.8p13f;
    return bits<F>(bits<I>((v + coarse) - coarse) | (bits<I>(v) & INT32_MIN));
}
#endif

// Fewer than W, at the end of a tensor: what lies beyond it is read as zeros.
template <class T> INLINE auto load(const T* from, int n) {
    if (n == W) return read(from);
    T row[W] = {};
    std::memcpy(row, from, n * sizeof(T));
    return read(row);
}
template <class T, class V> INLINE void store(T* to, V v, int n) {
    if (n == W) return write(to, v);
    T row[W];
    write(row, v);
    std::memcpy(to, row, n * sizeof(T));
}

// The largest of a group, of values that are not negative: first lane by lane, then of the lanes of W groups at once.
INLINE F larger(F v, F w) { return (v > w) | (v != v) ? v : w; }
INLINE I larger(I v, I w) { return v > w ? v : w; }

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(v, w, ...) __builtin_shufflevector(v, w, __VA_ARGS__)
#else
#define SHUFFLE(v, w, ...) __builtin_shuffle(v, w, I{__VA_ARGS__})
#endif
#if defined(__AVX512F__)
#define EVEN 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define ODD 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#define EVEN_FOURS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD_FOURS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#elif defined(__AVX2__)
#define EVEN 0, 2, 8, 10, 4, 6, 12, 14
#define ODD 1, 3, 9, 11, 5, 7, 13, 15
#define EVEN_FOURS 0, 1, 2, 3, 8, 9, 10, 11
#define ODD_FOURS 4, 5, 6, 7, 12, 13, 14, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define EVEN_FOURS EVEN
#define ODD_FOURS ODD
#endif
template <int count> INLINE I largest(const int32_t* rows) {  // lane k of the result is that of row k, where count is W
    if constexpr (count == 1) return read(rows);
    else {
        const F v = bits<F>(largest<count / 2>(rows)), w = bits<F>(largest<count / 2>(rows + count / 2 * W));
        if constexpr (count <= 4) return larger(bits<I>(SHUFFLE(v, w, EVEN)), bits<I>(SHUFFLE(v, w, ODD)));
        else return larger(bits<I>(SHUFFLE(v, w, EVEN_FOURS)), bits<I>(SHUFFLE(v, w, ODD_FOURS)));
    }
}
"""
