// A part of compute.cpp, which includes it once for each instruction set: vectors, functions of them, and the formats of numbers.
// Up to HALVED rows, weights of 16 bits go by half panels, and are widened for all rows at once; 0: they do not
#if defined(__AVX512F__)
constexpr int VL = 16, WIDE_ROWS = 6, ROWS = 12, HALVED = 0;  // tiles of 2 panels by 6 rows, or of 1 by 12: 24 sums of 32 registers
#elif defined(__AVX2__)
constexpr int VL = 8, WIDE_ROWS = 1, ROWS = 3, HALVED = 5;    // 2 by 1, 1 by 3, or a half by 5: 10 to 12 of 16
#else
constexpr int VL = 4, WIDE_ROWS = 0, ROWS = 1, HALVED = 0;
#endif
constexpr int PARTS = PANEL / VL;
constexpr size_t AHEAD = 1024;  // bytes before the weights that are read, which are fetched
constexpr int SUM = 128;
constexpr float INFINITE = __builtin_inff();

typedef float V __attribute__((vector_size(4 * VL)));
typedef float VU __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t VI __attribute__((vector_size(4 * VL)));

inline V load(const float* at) { return *(const VU*)at; }
inline void store(float* at, V v) { *(VU*)at = v; }
inline V load_upto(const float* at, int count) {  // of fewer than VL the others are zero
    if (count >= VL) return load(at);
    V v = {};
    for (int i = 0; i < count; i++) v[i] = at[i];
    return v;
}
inline void store_upto(float* at, V v, int count) {
    if (count >= VL) return store(at, v);
    for (int i = 0; i < count; i++) at[i] = v[i];
}
inline V all(float v) { return v - (V){}; }
constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }

inline V fuse(V a, V b, V c) {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline float total(V v) {
    float lanes[VL];
    store(lanes, v);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline int32_t total(VI v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < VL; i++) sum += v[i];
    return sum;
#endif
}
inline int32_t largest_of(VI v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t largest = v[0];
    for (int i = 1; i < VL; i++) largest = most(largest, v[i]);
    return largest;
#endif
}

// e^x: 2^n by the bits of the exponent, the rest by a polynomial (Cephes, expf.c), exact to one or two units
inline V exponential(V x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 88.0f ? all(88.0f) : x;
    const V n = fuse(x, all(1.44269504088896341f), all(12582912.0f)) - 12582912.0f;
    const V r = fuse(n, all(2.12194440e-4f), fuse(n, all(-0.693359375f), x));
    V p = all(1.9875691500e-4f);
    p = fuse(p, r, all(1.3981999507e-3f));
    p = fuse(p, r, all(8.3334519073e-3f));
    p = fuse(p, r, all(4.1665795894e-2f));
    p = fuse(p, r, all(1.6666665459e-1f));
    p = fuse(p, r, all(5.0000001201e-1f));
    p = fuse(p * r, r, r) + 1.0f;
    return p * (V)((__builtin_convertvector(n, VI) + 127) << 23);
}

inline V tanh_of(V x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

// erf by Abramowitz and Stegun 7.1.26, off by less than 1.5e-7
inline V gelu(V x) {
    const V z = x * 0.70710678118654752f;
    const V a = z < 0.0f ? -z : z;
    const V t = 1.0f / fuse(a, all(0.3275911f), all(1.0f));
    V p = fuse(all(1.061405429f), t, all(-1.453152027f));
    p = fuse(p, t, all(1.421413741f));
    p = fuse(p, t, all(-0.284496736f));
    p = fuse(p, t, all(0.254829592f)) * t;
    const V erf = 1.0f - p * exponential(-a * a);
    return 0.5f * x * (1.0f + (z < 0.0f ? -erf : erf));
}

inline V activated(V x, int activation) {
    switch (activation) {
        case SILU: return x / (1.0f + exponential(-x));
        case GELU: return gelu(x);
        case GELU_TANH: return 0.5f * x * (1.0f + tanh_of(0.79788456080286536f * (x + 0.044715f * x * x * x)));
        case SIGMOID: return 1.0f / (1.0f + exponential(-x));
        case QUICK_GELU: return x / (1.0f + exponential(-1.702f * x));
        case RELU_SQUARED: return x > 0.0f ? x * x : (V){};
        default: return x > 0.0f ? x : (V){};
    }
}

// ---------------------------------------------------------------- formats

typedef uint16_t H __attribute__((vector_size(2 * VL)));
typedef uint16_t HU __attribute__((vector_size(2 * VL), aligned(2), may_alias));

// How a product takes weights and inputs: one number of an output with one of a row
struct Float32;
struct Single {
    using Wide = Float32;  // the format of what is widened
    static inline V spread(const float* x) { return all(*x); }
    static inline V add(V weights, V inputs, V sums) { return fuse(weights, inputs, sums); }
};
struct Float32 : Single {
    static constexpr int BYTES = 4;
    static inline V widen(const uint8_t* at) { return *(const V*)at; }
};
struct Float16 : Single {
    static constexpr int BYTES = 2;
    static inline V widen(const uint8_t* at) {
#if defined(__AVX512F__)
        return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__F16C__)
        return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#else
        // the bits moved to their place, the exponent by a product: right for subnormal numbers, too
        const VI h = __builtin_convertvector(*(const HU*)at, VI);
        const V magnitude = (V)((h & 0x7fff) << 13) * 0x1p112f;
        const VI broken = (magnitude >= 0x1p16f) & 0x7f800000;  // infinity and NaN stay what they are
        return (V)((VI)magnitude | broken | ((h & 0x8000) << 16));
#endif
    }
    static constexpr float MOST = 65504.0f;
    static inline VI narrow(V size) {  // a sum rounds subnormal numbers, as they are in units of its last digit
        const VI bits = size < INFINITE ? (VI)size & 0x7fffffff : (VI){}, normal = (bits - (112 << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
        return size < 0x1p-14f ? (VI)(size + 0.5f) - (126 << 23) : size < INFINITE ? normal : size == INFINITE ? 0x7c00 - (VI){} : 0x7e00 - (VI){};
    }
};
struct Bfloat16 : Single {
    static constexpr int BYTES = 2;
    static inline V widen(const uint8_t* at) {
#if defined(__AVX512F__)
        return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16);
#elif defined(__AVX2__)
        return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16);
#else
        return (V)(__builtin_convertvector(*(const HU*)at, VI) << 16);
#endif
    }
    static constexpr float MOST = 0x1.fep127f;
    static inline VI narrow(V size) {
        const VI bits = size == size ? (VI)size : 0x7fc00000 - (VI){};
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

// Two numbers in bfloat16 as one of 32 bits. The processor's instruction fuses both products with a sum, one after the
// other, and takes numbers below 2^-126 for zero. GCC keeps the sums of its own function for it in memory.
struct Pairs {
    using Wide = Pairs;
    static constexpr int BYTES = 4;
    static inline V widen(const uint8_t* at) { return *(const V*)at; }
    static inline V spread(const float* x) { return (V)(*(const int32_t*)(const void*)x - (VI){}); }
    static inline V add(V weights, V inputs, V sums) {
#if defined(__AVX512BF16__)
        asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(inputs));
        return sums;
#else
        const VI second = 0xffff0000 - (VI){}, w = (VI)weights, x = (VI)inputs;
        sums = fuse((V)(w & second), (V)(x & second), sums);
        return fuse((V)(w << 16), (V)(x << 16), sums);
#endif
    }
};

// Numbers that lie anywhere
template <class W>
inline V read(const uint8_t* at) {
    if constexpr (W::BYTES == 4) return load((const float*)at);
    else return W::widen(at);
}
template <class W>
inline V read_upto(const uint8_t* at, int count) {
    if constexpr (W::BYTES == 4) return load_upto((const float*)at, count);
    if (count >= VL) return read<W>(at);
    uint16_t some[VL] = {};
    __builtin_memcpy(some, at, 2 * count);
    return W::widen((const uint8_t*)some);
}

// Numbers to their nearest ones in a format, the even one of two: what is beyond it to the largest, but infinity and NaN
// stay, so that a model that is broken is noticed
template <class W>
void narrow(const float* from, int count, uint8_t* to) {
    for (int i = 0; i < count; i += VL) {
        const V v = load_upto(from + i, count - i), size = v < 0.0f ? -v : v;
        const VI sign = (VI)v >> 16 & 0x8000;
        const H h = __builtin_convertvector(W::narrow((size > W::MOST) & (size < INFINITE) ? all(W::MOST) : size) | sign, H);
        __builtin_memcpy(to + 2 * i, &h, 2 * least(VL, count - i));
    }
}
inline void narrow(int format, const float* from, int count, uint8_t* to) {
    if (format == FLOAT16) return narrow<Float16>(from, count, to);
    if (format == BFLOAT16) return narrow<Bfloat16>(from, count, to);
    __builtin_memcpy(to, from, count * sizeof(float));
}
