// What a step computes, compiled once for each instruction set (LEVEL). Functions here are static and use builtins
// alone:
// one that the linker shares between the copies might be the one of another instruction set.
//
// Order of sums: a product is one sum over each SUM inputs, and over these, first to last; a score is one vector of
// sums over a head, joined as a tree; attention is a sum over the positions of each CHUNK; the chunks of a SPAN are
// joined first to last, and so are the spans. Tiles, threads, blocks of rows and pages change none of it. Products and
// sums are fused where `fuse` is, and nowhere else (-ffp-contract=off).
#include "engine.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace LEVEL {
namespace {

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
    const V n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (V)((__builtin_convertvector(n, VI) + 127) << 23);
}

inline V tanh_of(V x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

// erf by Abramowitz and Stegun 7.1.26, off by less than 1.5e-7
inline V gelu(V x) {
    const V z = x * 0.70710678118654752f;
    const V a = z < 0.0f ? -z : z;
    const V t = 1.0f / (1.0f + 0.3275911f * a);
    const V p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    const V erf = 1.0f - p * exponential(-a * a);
    return 0.5f * x * (1.0f + (z < 0.0f ? -erf : erf));
}

inline V activated(V x, int activation) {
    switch (activation) {
        case SILU: return x / (1.0f + exponential(-x));
        case GELU: return gelu(x);
        case GELU_TANH: return 0.5f * x * (1.0f + tanh_of(0.79788456080286536f * (x + 0.044715f * x * x * x)));
        case SIGMOID: return 1.0f / (1.0f + exponential(-x));
        default: return x > 0.0f ? x : (V){};
    }
}

// ---------------------------------------------------------------- formats

typedef uint16_t H __attribute__((vector_size(2 * VL)));
typedef uint16_t HU __attribute__((vector_size(2 * VL), aligned(2), may_alias));

struct Float32 {
    static constexpr int BYTES = 4;
    static inline V widen(const uint8_t* at) { return *(const V*)at; }
};
struct Float16 {
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
        const VI bits = size < INFINITE ? (VI)size : (VI){}, normal = (bits - (112 << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
        return size < 0x1p-14f ? (VI)(size + 0.5f) - (126 << 23) : size < INFINITE ? normal : size == INFINITE ? 0x7c00 - (VI){} : 0x7e00 - (VI){};
    }
};
struct Bfloat16 {
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

// ---------------------------------------------------------------- products

// Memory that is fetched while something is computed: a line for each input
struct Fetch { const uint8_t* from; int lines; };

// `count` inputs of `N` vectors of `P` panels, whose weights begin at `weights`, by `R` rows, to out [P][R][PANEL], or
// added to it. Fetched is what `fetch` says; without it, the weights that come.
template <class W, int P, int R, int N = PARTS>
inline void block(const uint8_t* const* weights, int count, const float* x, int64_t stride, float* out, bool add, Fetch fetch) {
    const uint8_t* w[P];
    for (int p = 0; p < P; p++) w[p] = weights[p];
    V sums[P][N][R];
    for (auto& a : sums)
        for (auto& b : a)
            for (auto& c : b) c = (V){};
    for (int k = 0; k < count; k++) {
        if (k < fetch.lines) __builtin_prefetch(fetch.from + 64 * k, 0, 3);
        V wide[P][N];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            if (!fetch.from) {
                __builtin_prefetch(w[p] + AHEAD, 0, 3);
                if (W::BYTES == 4) __builtin_prefetch(w[p] + AHEAD + 64, 0, 3);
            }
#pragma GCC unroll 16
            for (int v = 0; v < N; v++) {
                wide[p][v] = W::widen(w[p] + v * VL * W::BYTES);
                if (P * N > R)  // rows are fewer: their inputs stay in registers, else the weights
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) sums[p][v][r] = fuse(wide[p][v], all(x[r * stride + k]), sums[p][v][r]);
            }
            w[p] += PANEL * W::BYTES;
        }
        if (P * N > R) continue;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const V input = all(x[r * stride + k]);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++)
#pragma GCC unroll 16
                for (int v = 0; v < N; v++) sums[p][v][r] = fuse(wide[p][v], input, sums[p][v][r]);
        }
    }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++)
            for (int v = 0; v < N; v++) {
                float* at = out + (p * R + r) * PANEL + v * VL;
                store(at, add ? load(at) + sums[p][v][r] : sums[p][v][r]);
            }
}

// Up to `R` rows, block after block. The sums of each SUM inputs are added up in order: fewer roundings.
template <class W, int P, int R>
void few(const Matrix& m, int panel, int apart, const float* x, int64_t stride, int rows, float* out) {
    if constexpr (R > 1) {
        if (rows < R) return few<W, P, R - 1>(m, panel, apart, x, stride, rows, out);
    }
    for (int start = 0; start < m.inputs; start += SUM) {
        const uint8_t* w[P];
        for (int p = 0; p < P; p++) w[p] = m.weights + ((int64_t)(panel + p * apart) * m.inputs + start) * PANEL * W::BYTES;
        block<W, P, R>(w, least(SUM, m.inputs - start), x + start, stride, out, start > 0, {});
    }
}

// The same of one panel, half after half: of fewer vectors there are sums for more rows.
template <class W, int R>
void halved(const Matrix& m, int panel, const float* x, int64_t stride, int rows, float* out) {
    if constexpr (R > ROWS + 1) {
        if (rows < R) return halved<W, R - 1>(m, panel, x, stride, rows, out);
    }
    for (int start = 0; start < m.inputs; start += SUM)
        for (int half = 0; half < PANEL; half += PANEL / 2) {
            const uint8_t* w = m.weights + (((int64_t)panel * m.inputs + start) * PANEL + half) * W::BYTES;
            const Fetch fetch = half ? Fetch{w, 0} : Fetch{};
            block<W, 1, R, PARTS / 2>(&w, least(SUM, m.inputs - start), x + start, stride, out + half, start > 0, fetch);
        }
}

template <int R>
inline void tile(const uint8_t* const* w, int count, const float* x, int64_t stride, int rows, float* out, bool add, Fetch fetch) {
    if constexpr (R > 1) {
        if (rows < R) return tile<R - 1>(w, count, x, stride, rows, out, add, fetch);
    }
    block<Float32, 1, R>(w, count, x, stride, out, add, fetch);
}

// Up to BATCH rows, to out [rows][PANEL]: each block of weights is read once, made float32, and multiplied from the
// caches by all rows. Meanwhile the next block is fetched, a part in each tile. The bits are those of `few`.
template <class W>
void many(const Matrix& m, int panel, const float* x, int64_t stride, int rows, float* out) {
    alignas(64) float wide[W::BYTES == 4 ? 1 : SUM * PANEL];
    const int tiles = (rows + ROWS - 1) / ROWS;
    for (int start = 0; start < m.inputs; start += SUM) {
        const int count = least(SUM, m.inputs - start);
        const uint8_t* w = m.weights + ((int64_t)panel * m.inputs + start) * PANEL * W::BYTES;
        const uint8_t* next = w + count * PANEL * W::BYTES;
        if (W::BYTES != 4) {
            for (int i = 0; i < count * PANEL; i += VL) store(wide + i, W::widen(w + i * W::BYTES));
            w = (const uint8_t*)wide;
        }
        for (int t = 0, row = 0; t < tiles; t++) {
            const int taken = (rows - row + tiles - t - 1) / (tiles - t);
            const int lines = count * PANEL * W::BYTES / 64, from = lines * t / tiles;
            const Fetch fetch{next + 64 * from, lines * (t + 1) / tiles - from};
            tile<ROWS>(&w, count, x + row * stride + start, stride, taken, out + row * PANEL, start > 0, fetch);
            row += taken;
        }
    }
}

// Panels of `m` for all rows. `each(panel, row, values, gated)`: what becomes of PANEL outputs of a row, and of those
// of
// the panel `apart` from it, where there is one.
template <class W, class Each>
inline void multiply(const Matrix& m, int panel, int count, int apart, const float* x, int64_t stride, int rows, Each each) {
    alignas(64) float out[2 * BATCH * PANEL];
    for (int p = panel; p < panel + count; p++) {
        if (rows <= WIDE_ROWS && (apart || p + 1 < panel + count)) {  // two panels at a time read memory faster
            few<W, 2, most(1, WIDE_ROWS)>(m, p, apart ? apart : 1, x, stride, rows, out);
            for (int r = 0; r < rows; r++) each(p, r, out + r * PANEL, out + (rows + r) * PANEL);
            if (apart) continue;
            for (int r = 0; r < rows; r++) each(p + 1, r, out + (rows + r) * PANEL, nullptr);
            p++;
            continue;
        }
        for (int row = 0; row < rows; row += BATCH) {
            const int taken = least(BATCH, rows - row);
            for (int half = 0; half < (apart ? 2 : 1); half++) {
                float* to = out + half * taken * PANEL;
                if (taken <= ROWS) few<W, 1, ROWS>(m, p + half * apart, 0, x + row * stride, stride, taken, to);
                else if (W::BYTES == 2 && taken <= HALVED) halved<W, HALVED>(m, p + half * apart, x + row * stride, stride, taken, to);
                else many<W>(m, p + half * apart, x + row * stride, stride, taken, to);
            }
            for (int r = 0; r < taken; r++) each(p, row + r, out + r * PANEL, out + (taken + r) * PANEL);
        }
    }
}

// ---------------------------------------------------------------- products in int8

#if defined(__AVX512VNNI__)
constexpr int ROWS8 = 6;
#else
constexpr int ROWS8 = 3;
#endif
constexpr int RAISED = 128;
constexpr size_t GROUP_BYTES = PANEL * (4 + GROUP);

inline size_t panel_bytes(const Matrix& m) {
    if (m.format == INT8) return groups_of(m.inputs) * GROUP_BYTES;
    return (size_t)m.inputs * PANEL * bytes_of(m.format);
}

// A row in int8, each group by the scale of its largest value, with what `RAISED` weights add to its products
void quantize(const float* x, int width, uint8_t* to) {
    const int groups = groups_of(width);
    int8_t* values = (int8_t*)to;
    float* scales = (float*)(to + (size_t)groups * GROUP);
    int32_t* added = (int32_t*)(scales + groups);
    for (int g = 0; g < groups; g++) {
        const int begin = g * GROUP, end = least(width, begin + GROUP);
        VI top = {};  // bits of sizes: those of infinity and NaN are the largest, and come out as NaN
        for (int i = begin; i < end; i += VL) {
            const VI size = (VI)load_upto(x + i, end - i) & 0x7fffffff;
            top = size > top ? size : top;
        }
        const int32_t bits = largest_of(top);
        float largest;
        __builtin_memcpy(&largest, &bits, 4);
        const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;  // of less the inverse may be infinite
        scales[g] = largest / 127.0f + (largest - largest);
        typedef int8_t B __attribute__((vector_size(VL), aligned(1), may_alias));
        VI sums = {};
        for (int i = begin; i < end; i += VL) {
            const V scaled = load_upto(x + i, end - i) * inverse, finite = scaled == scaled ? scaled : (V){};
            const V rounded = (finite + 12582912.0f) - 12582912.0f;  // to the nearest
            const VI whole = __builtin_convertvector(rounded, VI);
            *(B*)(values + i) = __builtin_convertvector(whole, B);
            sums += whole;
        }
        added[g] = -RAISED * total(sums);
        for (int i = begin + (end - begin + VL - 1) / VL * VL; i < begin + GROUP; i++) values[i] = 0;
    }
}

// One panel by `R` rows, to out [R][PANEL]. The sum of each group is exact; the groups are added up in order. Instructions
// multiply bytes without a sign by bytes with one. VNNI: weights are made 128 larger (`RAISED`), and what that adds is
// taken away first. AVX2: the weights' signs go over to the inputs. Meanwhile lines [`line`, `end`) of each group of the
// next panel are fetched.
#if defined(__AVX512VNNI__)
// GCC keeps the sums of its own function for it in memory, and is half as fast
inline void dot(__m512i& sum, __m512i weights, __m512i inputs) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
}

template <int R>
void tile8(const Matrix& m, int panel, const uint8_t* x, size_t stride, float* out, int line, int end) {
    constexpr int VECTORS = PANEL / 16;
    typedef int32_t Quad __attribute__((aligned(4), may_alias));
    const int groups = groups_of(m.inputs);
    const size_t of_panel = groups * GROUP_BYTES;
    const uint8_t *w = m.weights + panel * of_panel, *scale = x + (size_t)groups * GROUP, *added = scale + 4 * (size_t)groups;
    const __m512i raised = _mm512_set1_epi8((char)RAISED);
    __m512 totals[R][VECTORS] = {};
    for (int g = 0; g < groups; g++, w += GROUP_BYTES, x += GROUP, scale += 4, added += 4) {
        for (int at = line; at < end; at++) __builtin_prefetch(w + of_panel + 64 * at, 0, 2);
        __m512i sums[R][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (auto& sum : sums[r]) sum = _mm512_set1_epi32(*(const Quad*)(added + r * stride));
#pragma GCC unroll 8
        for (int k = 0; k < GROUP; k += 4) {
            __m512i weights[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                weights[v] = _mm512_xor_si512(*(const __m512i*)(w + (4 + k) * PANEL + 64 * v), raised);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m512i inputs = _mm512_set1_epi32(*(const Quad*)(x + r * stride + k));
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) dot(sums[r][v], weights[v], inputs);
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            const __m512 scales = _mm512_loadu_ps((const float*)w + 16 * v);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m512 both = scales * _mm512_set1_ps(*(const float*)(scale + r * stride));
                totals[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][v]), both, totals[r][v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(out + r * PANEL + 16 * v, totals[r][v]);
}
#else
template <int R>
void tile8(const Matrix& m, int panel, const uint8_t* x, size_t stride, float* out, int line, int end) {
    const int groups = groups_of(m.inputs);
    const uint8_t* w = m.weights + panel * groups * GROUP_BYTES;
    for (int i = 0; i < R * PANEL; i++) out[i] = 0.0f;
    for (int g = 0; g < groups; g++, w += GROUP_BYTES) {
        for (int at = line; at < end; at++) __builtin_prefetch(w + groups * GROUP_BYTES + 64 * at, 0, 2);
        const float* scales = (const float*)w;
        const uint8_t* values = w + 4 * PANEL;
        const int8_t* rows[R];
        float sizes[R];
        for (int r = 0; r < R; r++) {
            rows[r] = (const int8_t*)(x + r * stride) + g * GROUP;
            sizes[r] = ((const float*)(x + r * stride + (size_t)groups * GROUP))[g];
        }
#if defined(__AVX2__)
        const __m256i ones = _mm256_set1_epi16(1);
        __m256i sums[R][PANEL / 8] = {};
        for (int k = 0; k < GROUP; k += 4, values += 4 * PANEL) {
#pragma GCC unroll 4
            for (int v = 0; v < PANEL / 8; v++) {
                const __m256i weights = *(const __m256i*)(values + 32 * v), sizes = _mm256_abs_epi8(weights);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    typedef int32_t Quad __attribute__((aligned(4), may_alias));
                    const __m256i inputs = _mm256_set1_epi32(*(const Quad*)(rows[r] + k));
                    const __m256i pairs = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(inputs, weights));  // below 2^15
                    sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < PANEL / 8; v++) {
                const __m256 scale = _mm256_loadu_ps(scales + 8 * v) * _mm256_set1_ps(sizes[r]);
                float* at = out + r * PANEL + 8 * v;
                _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][v]), scale, _mm256_loadu_ps(at)));
            }
#else
        for (int r = 0; r < R; r++) {
            int32_t sums[PANEL] = {};
            for (int k = 0; k < GROUP; k += 4)
                for (int i = 0; i < PANEL; i++)
                    for (int j = 0; j < 4; j++) sums[i] += (int8_t)values[k * PANEL + 4 * i + j] * rows[r][k + j];
            for (int i = 0; i < PANEL; i++) out[r * PANEL + i] += (float)sums[i] * (scales[i] * sizes[r]);
        }
#endif
    }
}
#endif

template <int R>
inline void any_rows8(const Matrix& m, int panel, const uint8_t* x, size_t stride, int rows, float* out, int line, int end) {
    if constexpr (R > 1) {
        if (rows < R) return any_rows8<R - 1>(m, panel, x, stride, rows, out, line, end);
    }
    tile8<R>(m, panel, x, stride, out, line, end);
}

// As `multiply`, of rows in int8
template <class Each>
inline void multiply8(const Matrix& m, int panel, int count, int apart, const uint8_t* x, size_t stride, int rows, Each each) {
    constexpr int LINES = GROUP_BYTES / 64;
    alignas(64) float out[2 * ROWS8 * PANEL];
    const int tiles = (rows + ROWS8 - 1) / ROWS8;
    for (int p = panel; p < panel + count; p++)
        for (int t = 0, row = 0; t < tiles; t++) {
            const int taken = (rows - row + tiles - t - 1) / (tiles - t), line = LINES * t / tiles, end = LINES * (t + 1) / tiles;
            const uint8_t* from = x + row * stride;
            any_rows8<ROWS8>(m, p, from, stride, taken, out, line, end);
            if (apart) any_rows8<ROWS8>(m, p + apart, from, stride, taken, out + taken * PANEL, line, end);
            for (int r = 0; r < taken; r++) each(p, row + r, out + r * PANEL, out + (taken + r) * PANEL);
            row += taken;
        }
}

// ---------------------------------------------------------------- norms

void normalize(const Operation& o, const float* x, float* y, int width) {
    V sum = {}, squares = {};
    float mean = 0.0f;
    if (o.norm == LAYER_NORM) {
        for (int i = 0; i < width; i += VL) sum += load(x + i);
        mean = total(sum) / width;
    }
    for (int i = 0; i < width; i += VL) {
        const V v = load(x + i) - mean;
        squares = fuse(v, v, squares);
    }
    const float factor = 1.0f / __builtin_sqrtf(total(squares) / width + o.epsilon);
    for (int i = 0; i < width; i += VL) {
        const V v = (load(x + i) - mean) * factor * load(o.gain + i);
        store(y + i, o.shift ? v + load(o.shift + i) : v);
    }
}

inline const float* row_of(const Engine& e, const Operation& o, int row) {
    const Buffer& b = e.model.buffers[o.from];
    return b.data + (int64_t)(o.wanted == 1 ? e.step.wanted[row] : row) * b.width;
}

inline int rows_of(const Engine& e, const Operation& o) { return o.wanted ? e.step.wanted_count : e.step.rows; }

// ---------------------------------------------------------------- the threads' parts

// Calls `work(first, count)` for pieces, those of one's own part first, then of those of the others. The step is read
// in
// `work` alone: a thread that comes late gets no piece.
template <class Work>
inline void share(Engine& e, Phase& phase, int thread, uint32_t round, Work work) {
    const int threads = e.model.threads;
    const int total = __atomic_load_n(&phase.total, __ATOMIC_ACQUIRE), piece = __atomic_load_n(&phase.piece, __ATOMIC_ACQUIRE);
    for (int t = 0; t < threads; t++) {
        const int whose = (thread + t) % threads;
        const int begin = (int)((int64_t)total * whose / threads), size = (int)((int64_t)total * (whose + 1) / threads) - begin;
        for (int at; (at = take(phase.next[whose], piece, size, round)) >= 0;) {
            const int count = least(piece, size - at);
            work(begin + at, count);
            finish(phase, count);
        }
    }
}

// ---------------------------------------------------------------- a linear layer

inline bool is_gated(const Operation& o) { return o.ending == GATED || o.ending == GATED_BY; }

void finish_panel(const Engine& e, const Operation& o, int panel, int row, float* values, float* gated) {
    const Matrix& m = *o.matrix;
    const Buffer& to = e.model.buffers[o.to];
    float* at = to.data + (int64_t)row * to.width + panel * PANEL;
    const int count = least(PANEL, to.width - panel * PANEL);
    for (int i = 0; i < PANEL; i += VL) {
        V v = load(values + i);
        if (m.bias) v += load(m.bias + panel * PANEL + i);
        if (is_gated(o)) {
            V value = load(gated + i);
            if (m.bias) value += load(m.bias + (panel + m.panels / 2) * PANEL + i);
            v = o.ending == GATED ? activated(v, o.activation) * value : v * activated(value, o.activation);
        }
        if (o.ending == ACTIVATED) v = activated(v, o.activation);
        if (o.scale != 0.0f && o.scale != 1.0f) v *= o.scale;
        if (o.ending == CAPPED) v = o.cap * tanh_of(v / o.cap);
        if (o.ending == ADD) v += load_upto(at + i, count - i);
        store_upto(at + i, v, count - i);
    }
}

inline bool is_prepared(const Operation& o) { return o.norm != NO_NORM || o.matrix->format == INT8; }
inline int pieces_of(const Operation& o) { return is_gated(o) ? o.matrix->panels / 2 : o.matrix->panels; }
inline int own_rows(const Operation& o) { return o.matrix->format == INT8 ? OWN_INT8 : OWN_ROWS; }

// How far apart the rows are that a product reads, in bytes
inline size_t stride_of(const Engine& e, const Operation& o) {
    const int inputs = o.matrix->inputs;
    if (!is_prepared(o)) return (size_t)e.model.buffers[o.from].width * 4;
    return o.matrix->format == INT8 ? quantized_bytes(inputs) : (size_t)inputs * 4;
}

// A row as a product reads it: normalized, quantized, or both by way of `room`
void prepare_row(const Engine& e, const Operation& o, int row, float* room, uint8_t* to) {
    const float* x = row_of(e, o, row);
    const bool quantized = o.matrix->format == INT8;
    if (o.norm != NO_NORM) {
        float* normed = quantized ? room : (float*)to;
        normalize(o, x, normed, o.matrix->inputs);
        x = normed;
    }
    if (quantized) quantize(x, o.matrix->inputs, to);
}

void linear(Engine& e, const Operation& o, Phase& phase, int thread, uint32_t round) {
    const Matrix& m = *o.matrix;
    uint8_t* own = (uint8_t*)e.own[thread] + (m.format == INT8 ? ((size_t)m.inputs * 4 + 63) / 64 * 64 : 0);
    bool prepared = false;
    share(e, phase, thread, round, [&](int piece, int count) {
        const int all_rows = rows_of(e, o), panels = pieces_of(o);
        const int panel = piece % panels, from = piece / panels * BAND, rows = least(BAND, all_rows - from);
        const size_t stride = stride_of(e, o);
        const uint8_t* x = (const uint8_t*)e.model.buffers[o.from].data;
        if (is_prepared(o)) {
            x = all_rows > own_rows(o) ? e.ready : own;
            for (int row = 0; row < rows && x == own && !prepared; row++)
                prepare_row(e, o, row, e.own[thread], own + row * stride);
            prepared = true;
        }
        x += from * stride;
        auto each = [&](int p, int row, float* values, float* gated) { finish_panel(e, o, p, from + row, values, gated); };
        const int apart = is_gated(o) ? m.panels / 2 : 0;
        if (m.format == INT8) return multiply8(m, panel, count, apart, x, stride, rows, each);
        const float* floats = (const float*)x;
        const int64_t width = stride / 4;
        switch (m.format) {
            case FLOAT32: return multiply<Float32>(m, panel, count, apart, floats, width, rows, each);
            case FLOAT16: return multiply<Float16>(m, panel, count, apart, floats, width, rows, each);
            default: return multiply<Bfloat16>(m, panel, count, apart, floats, width, rows, each);
        }
    });
}

// ---------------------------------------------------------------- pages

inline uint8_t* page_of(const Model& m, int layer, int page) {
    const int64_t row = 2 * (int64_t)m.kv_width * bytes_of(m.kv_format);
    return m.keys_values + ((int64_t)layer * m.pages + page) * m.page_size * row;
}

// Keys of a head at a position; its values are `kv_width` numbers behind
inline uint8_t* key_at(const Engine& e, const Operation& o, const Block& b, int head, int position) {
    const Model& m = e.model;
    const int page = e.step.tables[b.table + position / m.page_size];
    const int64_t number = (int64_t)(position % m.page_size) * 2 * m.kv_width + head * o.size;
    return page_of(m, o.layer, page) + number * bytes_of(m.kv_format);
}

// The root mean square norm of `size` numbers, which may be any number
void norm_heads(const Operation& o, const float* gain, float* x, int size) {
    V squares = {};
    for (int i = 0; i < size; i += VL) {
        const V v = load_upto(x + i, size - i);
        squares = fuse(v, v, squares);
    }
    const float factor = 1.0f / __builtin_sqrtf(total(squares) / size + o.epsilon);
    for (int i = 0; i < size; i += VL) {
        const int left = size - i;
        store_upto(x + i, load_upto(x + i, left) * factor * load_upto(gain + i, left), left);
    }
}

void turn_head(const Operation& o, const float* gain, float* x, const float* cosines, const float* sines, float scale) {
    if (gain) norm_heads(o, gain, x, o.size);
    const int half = o.turned / 2, apart = o.paired ? 1 : half, step = o.paired ? 2 : 1;
    for (int i = 0; i < half; i++) {
        const float a = x[step * i], b = x[step * i + apart];
        x[step * i] = a * cosines[i] - b * sines[i];
        x[step * i + apart] = b * cosines[i] + a * sines[i];
    }
    if (scale != 1.0f)
        for (int i = 0; i < o.size; i += VL) store_upto(x + i, load_upto(x + i, o.size - i) * scale, o.size - i);
}

void turn(Engine& e, const Operation& o, int block) {
    const Block& b = e.blocks[block];
    const Model& m = e.model;
    for (int row = b.row; row < b.row + b.rows; row++) {
        const int position = e.step.positions[row];
        const float *cosines = nullptr, *sines = nullptr;
        if (o.turned) {
            const Turns& t = m.turns[o.table];
            const int64_t at = (int64_t)position * t.half;
            cosines = t.cosines + at;
            sines = t.sines + at;
        }
        float* x = m.buffers[o.from].data + (int64_t)row * m.buffers[o.from].width;
        float* keys = x + o.heads * o.size;
        const float *query_gain = o.query_gain, *key_gain = o.key_gain;
        if (o.together && query_gain && key_gain) {
            norm_heads(o, query_gain, x, o.heads * o.size);
            norm_heads(o, key_gain, keys, o.kv_heads * o.size);
            query_gain = key_gain = nullptr;
        }
        const float scale = o.shift ? o.scale * o.shift[position] : o.scale;
        for (int h = 0; h < o.heads; h++) turn_head(o, query_gain, x + h * o.size, cosines, sines, scale);
        for (int h = 0; h < o.kv_heads; h++) turn_head(o, key_gain, keys + h * o.size, cosines, sines, 1.0f);
        if (!m.pages) continue;
        uint8_t* to = key_at(e, o, b, 0, position);
        const int width = o.kv_heads * o.size;
        narrow(m.kv_format, keys, width, to);
        narrow(m.kv_format, keys + width, width, to + (int64_t)m.kv_width * bytes_of(m.kv_format));
    }
}

// ---------------------------------------------------------------- attention

#if defined(__AVX512F__)
// Lane i is the total of v[i], as `total` makes it
inline V totals(const V* v) {
    __m512 p[4];
    for (int e = 0; e < 4; e++) {
        const __m512 a = _mm512_shuffle_f32x4(v[e], v[4 + e], 0x44) + _mm512_shuffle_f32x4(v[e], v[4 + e], 0xee);
        const __m512 b = _mm512_shuffle_f32x4(v[8 + e], v[12 + e], 0x44) + _mm512_shuffle_f32x4(v[8 + e], v[12 + e], 0xee);
        p[e] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    }
    const __m512 a = _mm512_unpacklo_ps(p[0], p[1]) + _mm512_unpackhi_ps(p[0], p[1]);
    const __m512 b = _mm512_unpacklo_ps(p[2], p[3]) + _mm512_unpackhi_ps(p[2], p[3]);
    return (V)(_mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee));
}
#elif defined(__AVX2__)
inline V totals(const V* v) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return (V)(_mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31));
}
#else
inline V totals(const V* v) {
    float sums[VL];
    for (int i = 0; i < VL; i++) sums[i] = total(v[i]);
    return load(sums);
}
#endif

// Scores of VL keys. Those that are none are the last one again.
template <class W>
inline V scores_of(const float* query, const uint8_t* const* keys, int size) {
    V sums[VL];
    for (auto& sum : sums) sum = (V){};
    int d = 0;
    for (; d + VL <= size; d += VL) {
        const V q = load(query + d);
#pragma GCC unroll 16
        for (int p = 0; p < VL; p++) sums[p] = fuse(q, read<W>(keys[p] + d * W::BYTES), sums[p]);
    }
    if (d < size) {
        const V q = load_upto(query + d, size - d);
        for (int p = 0; p < VL; p++) sums[p] = fuse(q, read_upto<W>(keys[p] + d * W::BYTES, size - d), sums[p]);
    }
    return totals(sums);
}

// A query of a chunk, and its part [2 + size]: the largest score, the sum of e^(score - largest), and the values by these.
// `added`: by distance, of its head
struct Query { const float* at; float* part; const float* added; };

// The values `first` to `count` by the weights of `R` queries, position after position: `D` vectors of them
template <class W, int D, int R>
inline void weigh(const Query* queries, int rows, const float (*weights)[CHUNK], const uint8_t* const* values, int first, int count, int from) {
    if constexpr (R > 1) {
        if (rows < R) return weigh<W, D, R - 1>(queries, rows, weights, values, first, count, from);
    }
    V sums[R][D];
    for (auto& a : sums)
        for (auto& b : a) b = (V){};
    for (int p = first; p < count; p++) {
        const uint8_t* at = values[p] + from * W::BYTES;
#pragma GCC unroll 8
        for (int d = 0; d < D; d++) {
            const V value = read<W>(at + d * VL * W::BYTES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][d] = fuse(all(weights[r][p]), value, sums[r][d]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++) store(queries[r].part + 2 + from + d * VL, sums[r][d]);
    if (rows > R) weigh<W, D, R>(queries + R, rows - R, weights + R, values, first, count, from);
}

// Up to BLOCK queries that see the same positions, and one chunk of these, `first` to `count` of it: keys and values are
// read once for all. The first key is `apart` away. While keys are read, their values are fetched; and the keys that are
// `next` bytes behind, if they are known.
template <class W>
void attend_chunk(const Operation& o, const Query* queries, int rows, const uint8_t* const* keys, int64_t values_behind,
                  int first, int count, int apart, int64_t next) {
    alignas(64) float scores[BLOCK][CHUNK];
    const uint8_t* values[CHUNK];
    for (int p = first; p < count; p++) values[p] = keys[p] + values_behind * W::BYTES;
    for (int p = 0; p < count; p += VL) {
        for (int i = most(p, first); i < least(p + VL, count); i++)
            for (int at = 0; at < o.size * W::BYTES; at += 64) {
                __builtin_prefetch(values[i] + at, 0, 2);
                if (next) __builtin_prefetch(keys[i] + next + at, 0, 2);
            }
        for (int r = 0; r < rows; r++) {
            V s = all(-INFINITE);
            if (p + VL > first) {
                const float* added = queries[r].added;
                s = scores_of<W>(queries[r].at, keys + p, o.size);
                if (o.soft_cap > 0.0f) s = o.soft_cap * tanh_of(s / o.soft_cap);
                for (int i = 0; added && i < VL; i++) s[i] += added[least(most(apart - p - i, 0), o.distance_count - 1)];
                for (int i = 0; (p < first || p + VL > count) && i < VL; i++)
                    if (p + i < first || p + i >= count) s[i] = -INFINITE;
            }
            store(scores[r] + p, s);
        }
    }
    for (int r = 0; r < rows; r++) {
        V top = all(-INFINITE), sum = {};
        for (int p = 0; p < count; p += VL) {
            const V s = load(scores[r] + p);
            top = s > top ? s : top;
        }
        float largest = top[0];
        for (int i = 1; i < VL; i++) largest = top[i] > largest ? top[i] : largest;
        for (int p = 0; p < count; p += VL) {
            const V s = load(scores[r] + p);
            const V weight = s == -INFINITE ? (V){} : exponential(s - largest);
            store(scores[r] + p, weight);
            sum += weight;
        }
        queries[r].part[0] = largest;
        queries[r].part[1] = total(sum);
    }
    int from = 0;
    for (; rows == 1 && from + 4 * VL <= o.size; from += 4 * VL) weigh<W, 4, 1>(queries, 1, scores, values, first, count, from);
    for (; from + 2 * VL <= o.size; from += 2 * VL) weigh<W, 2, 4>(queries, rows, scores, values, first, count, from);
    for (; from + VL <= o.size; from += VL) weigh<W, 1, 4>(queries, rows, scores, values, first, count, from);
    for (int r = 0; from < o.size && r < rows; r++) {
        V rest = {};
        for (int p = first; p < count; p++) rest = fuse(all(scores[r][p]), read_upto<W>(values[p] + from * W::BYTES, o.size - from), rest);
        store_upto(queries[r].part + 2 + from, rest, o.size - from);
    }
}

inline decltype(&attend_chunk<Float32>) attention_of(const Model& m) {
    if (m.kv_format == FLOAT16) return attend_chunk<Float16>;
    return m.kv_format == BFLOAT16 ? attend_chunk<Bfloat16> : attend_chunk<Float32>;
}

// Adds the part of the next chunk to that of those before
inline void join(float* sum, const float* part, int size) {
    const float largest = sum[0] > part[0] ? sum[0] : part[0];
    const V before = exponential(all(sum[0] - largest)), now = exponential(all(part[0] - largest));
    sum[0] = largest;
    sum[1] = sum[1] * before[0] + part[1] * now[0];
    for (int d = 0; d < size; d += VL) {
        const int left = size - d;
        store_upto(sum + 2 + d, fuse(load_upto(part + 2 + d, left), now, load_upto(sum + 2 + d, left) * before), left);
    }
}

inline int first_seen(const Operation& o, int position) { return o.window ? most(0, position - o.window + 1) : 0; }

inline int position_of(const Engine& e, const Block& b, int r) { return e.step.positions[b.row + r]; }

// The first span that any row of a block sees, and how many there are to the last
inline int first_span(const Engine& e, const Operation& o, const Block& b) {
    return first_seen(o, position_of(e, b, 0)) / SPAN;
}
inline int spans_of(const Engine& e, const Operation& o, const Block& b) {
    return position_of(e, b, b.rows - 1) / SPAN + 1 - first_span(e, o, b);
}

// The keys of a chunk's positions from `low` on, which begins at `start`; those that are none are their neighbour's.
void find_keys(const Engine& e, const Operation& o, const Block& b, int head, int start, int low, const uint8_t** keys) {
    const int end = least(CHUNK, position_of(e, b, b.rows - 1) + 1 - start), size = e.model.page_size;
    const int64_t row = 2 * (int64_t)e.model.kv_width * bytes_of(e.model.kv_format);
    for (int p = low; p < end;) {  // page by page
        const uint8_t* at = key_at(e, o, b, head, start + p);
        for (const int stop = least(end, p + size - (start + p) % size); p < stop; p++, at += row) keys[p] = at;
    }
    for (int p = end; p < CHUNK; p++) keys[p] = keys[end - 1];
    for (int p = 0; p < low; p++) keys[p] = keys[low];
}

// One span of the positions of a block's rows, for one head of keys: to parts [rows][group][2 + size], of the rows that
// see any of it. Its chunks are joined in order; `room` is for BLOCK more parts.
void attend_span(const Engine& e, const Operation& o, const Block& b, int head, int span, float* parts, float* room) {
    const int group = o.heads / o.kv_heads, length = 2 + o.size;
    const Buffer& queries = e.model.buffers[o.from];
    const auto attend = attention_of(e.model);
    const uint8_t* keys[CHUNK];
    const int seen = first_seen(o, position_of(e, b, 0)), last = position_of(e, b, b.rows - 1);
    for (int start = most(seen / CHUNK * CHUNK, span * SPAN); start < (span + 1) * SPAN && start <= last; start += CHUNK) {
        find_keys(e, o, b, head, start, most(0, seen - start), keys);
        for (int r = 0; r < b.rows; r++) {
            const int position = position_of(e, b, r), first = first_seen(o, position);
            const int count = least(CHUNK, position + 1 - start);
            if (count <= 0 || first >= start + CHUNK) continue;
            const bool begins = first >= start || start == span * SPAN;  // the first chunk of the span that it sees
            for (int g = 0; g < group; g += BLOCK) {  // heads of one key see the same
                const int taken = least(BLOCK, group - g);
                Query heads[BLOCK];
                for (int h = 0; h < taken; h++) {
                    const int own = head * group + g + h;
                    const float* query = queries.data + (int64_t)(b.row + r) * queries.width + own * o.size;
                    float* part = begins ? parts + (r * group + g + h) * length : room + h * length;
                    heads[h] = {query, part, o.distances ? o.distances + (int64_t)own * o.distance_count : nullptr};
                }
                attend(o, heads, taken, keys, e.model.kv_width, most(0, first - start), count, position - start, 0);
                for (int h = 0; !begins && h < taken; h++) join(parts + (r * group + g + h) * length, heads[h].part, o.size);
            }
        }
    }
}

// What a row and head attend to, to its place
inline void write(const Engine& e, const Operation& o, int row, int head, const float* sum) {
    float* to = e.model.buffers[o.to].data + (int64_t)row * e.model.buffers[o.to].width + head * o.size;
    const float inverse = 1.0f / sum[1];
    for (int d = 0; d < o.size; d += VL) store_upto(to + d, load_upto(sum + 2 + d, o.size - d) * inverse, o.size - d);
}

// A block and a head of keys
void attend_whole(Engine& e, const Operation& o, int thread, int piece) {
    const Block& b = e.blocks[piece / o.kv_heads];
    const int head = piece % o.kv_heads, group = o.heads / o.kv_heads, length = 2 + o.size, each = b.rows * group;
    float *sums = e.own[thread], *parts = sums + each * length, *room = parts + each * length;
    const int begun = first_span(e, o, b);
    for (int span = begun; span < begun + spans_of(e, o, b); span++) {
        attend_span(e, o, b, head, span, parts, room);
        for (int r = 0; r < b.rows; r++) {
            const int position = position_of(e, b, r), first = first_seen(o, position) / SPAN;
            if (first > span || position / SPAN < span) continue;
            for (int i = r * group; i < (r + 1) * group; i++) {
                if (first < span) join(sums + i * length, parts + i * length, o.size);
                else
                    for (int d = 0; d < length; d++) sums[i * length + d] = parts[i * length + d];
            }
        }
    }
    for (int i = 0; i < each; i++) write(e, o, b.row + i / group, head * group + i % group, sums + i * length);
}

// One span of a block and a head of keys; who does the last one joins them.
void attend_part(Engine& e, const Operation& o, int thread, int piece) {
    int block = 0;
    for (int size; piece >= (size = spans_of(e, o, e.blocks[block]) * o.kv_heads); block++) piece -= size;
    const Block& b = e.blocks[block];
    const int spans = spans_of(e, o, b), head = piece / spans, span = piece % spans, begun = first_span(e, o, b);
    const int group = o.heads / o.kv_heads, length = 2 + o.size, each = b.rows * group;
    const int64_t of_head = (int64_t)each * length * e.most_spans;
    float* parts = e.parts + ((int64_t)b.row * o.heads * e.most_spans) * length + head * of_head;
    attend_span(e, o, b, head, begun + span, parts + (int64_t)span * each * length, e.own[thread]);
    int32_t* come = e.come + block * o.kv_heads + head;
    if (__atomic_add_fetch(come, 1, __ATOMIC_ACQ_REL) < spans) return;
    __atomic_store_n(come, 0, __ATOMIC_RELAXED);  // for the next layer
    for (int i = 0; i < each; i++) {
        const int position = position_of(e, b, i / group);
        const int first = first_seen(o, position) / SPAN - begun, last = position / SPAN - begun;
        float* sum = parts + ((int64_t)first * each + i) * length;
        for (int s = first + 1; s <= last; s++) join(sum, parts + ((int64_t)s * each + i) * length, o.size);
        write(e, o, b.row + i / group, head * group + i % group, sum);
    }
}

// A block of rows of one slot, and a head: each chunk of its keys and values is read once for all rows.
void attend_cross(Engine& e, const Operation& o, int thread, int piece) {
    const Model& m = e.model;
    const Block& b = e.slots[piece / o.heads];
    const int head = piece % o.heads, length = 2 + o.size;
    const int64_t of_head = (int64_t)m.embeddings * m.cross_size, of_slots = (int64_t)m.slots * o.kv_heads * of_head;
    const int64_t of_key = (int64_t)m.cross_size * bytes_of(m.kv_format);
    const int64_t before = 2 * o.layer * of_slots + ((int64_t)b.table * o.kv_heads + head / (o.heads / o.kv_heads)) * of_head;
    const uint8_t* first = m.cross + before * bytes_of(m.kv_format);
    const Buffer& queries = m.buffers[o.from];
    const auto attend = attention_of(m);
    float *parts = e.own[thread], *room = parts + BLOCK * length;
    const uint8_t* keys[CHUNK];
    for (int start = 0; start < b.length; start += CHUNK) {
        const int count = least(CHUNK, b.length - start);
        for (int p = 0; p < CHUNK; p++) keys[p] = first + (start + least(p, count - 1)) * of_key;
        Query rows[BLOCK];
        for (int r = 0; r < b.rows; r++) {
            float* query = queries.data + (int64_t)(b.row + r) * queries.width + head * o.size;
            for (int d = 0; !start && o.scale != 1.0f && d < o.size; d++) query[d] *= o.scale;  // no other piece reads it
            rows[r] = {query, (start ? room : parts) + r * length, nullptr};
        }
        attend(o, rows, b.rows, keys, of_slots, 0, count, 0, CHUNK * of_key);
        for (int r = 0; start && r < b.rows; r++) join(parts + r * length, room + r * length, o.size);
    }
    for (int r = 0; r < b.rows; r++) write(e, o, b.row + r, head, parts + r * length);
}

// The keys and values of a head and PANEL rows, into panels; those of no row are zero.
void gather(Engine& e, const Operation& o, int piece) {
    const int rows = e.step.rows, panels = panels_of(rows), head = piece / panels, first = piece % panels * PANEL;
    const Buffer& from = e.model.buffers[o.from];
    float* keys = e.keys + ((int64_t)head * panels + piece % panels) * o.size * PANEL;
    for (int i = 0; i < PANEL; i++) {
        const float* key = from.data + (int64_t)(first + i) * from.width + (o.heads + head) * o.size;
        for (int d = 0; d < o.size; d++) keys[d * PANEL + i] = first + i < rows ? key[d] : 0.0f;
    }
    for (int at = 0; at < o.size; at += PANEL) {
        float* values = e.values + (((int64_t)head * panels_of(o.size) + at / PANEL) * rows + first) * PANEL;
        for (int i = 0; i < least(PANEL, rows - first); i++) {
            const float* value = from.data + (int64_t)(first + i) * from.width + (2 * o.heads + head) * o.size + at;
            for (int d = 0; d < PANEL; d++) values[i * PANEL + d] = at + d < o.size ? value[d] : 0.0f;
        }
    }
}

// The first row of a chunk that any of a batch's rows sees, and the one behind the last
inline int low_of(const Operation& o, const Block& b) { return o.window ? most(b.table, b.row - o.window + 1) : b.table; }
inline int high_of(const Operation& o, const Block& b) {
    const int end = b.table + b.length;
    return o.window ? least(end, b.row + b.rows - 1 + o.window) : end;
}

inline int place_at(const Operation& o, int away) {
    const int far = o.distance_count / 2;
    return o.places[most(-far, least(far, away)) + far];
}

// How far the nearest key before the others is whose place is `place` or behind it
int nearest_at(const Operation& o, int place) {
    int from = 0, to = o.distance_count;
    while (from < to) {
        const int middle = from + (to - from) / 2;
        if (o.places[middle] < place) from = middle + 1;
        else to = middle;
    }
    if (from == 0) return -(1 << 30);  // all that are farther have that place, too
    return from == o.distance_count ? 1 << 30 : from - o.distance_count / 2;
}

// Adds to a batch's scores what places give: products of its queries with keys of places, and of keys with queries of
// places. The scores are of `count` keys from row `low` on.
void add_places(const Engine& e, const Operation& o, const Block& b, int head, int low, int count, float* scores, int width) {
    const Buffer& from = e.model.buffers[o.from];
    const int away = low - b.row;  // from the first row to the first key
    for (int of_keys = 0; of_keys < 2; of_keys++) {
        const Matrix* m = of_keys ? o.place_queries : o.place_keys;
        if (!m) continue;
        const float* x = from.data + (int64_t)(of_keys ? low : b.row) * from.width + (of_keys ? o.heads + head : head) * o.size;
        const int before = head * (m->panels / o.heads), rows = of_keys ? count : b.rows, others = of_keys ? b.rows : count;
        for (int start = 0; start < rows; start += BATCH) {  // some keys have few places
            const int taken = least(BATCH, rows - start), nearest = away - b.rows + 1 + (of_keys ? start : 0);
            const int low_panel = place_at(o, nearest) / PANEL;
            const int high_panel = place_at(o, of_keys ? away + start + taken - 1 : away + count - 1) / PANEL;
            multiply<Float32>(*m, before + low_panel, high_panel - low_panel + 1, 0, x + (int64_t)start * from.width, from.width, taken, [&](int p, int i, float* found, float*) {
                const int row = start + i, place = (p - before) * PANEL, first = of_keys ? away + row - others + 1 : away - row;
                const int end = least(first + others, nearest_at(o, place + PANEL));
                for (int far = most(first, nearest_at(o, place)); far < end; far++)
                    scores[of_keys ? (away + row - far) * width + row : row * width + far - first] += found[place_at(o, far) - place] * o.scale;
            });
        }
    }
}

// A head and a batch of a chunk's rows: their scores of the rows they see, e^(score - largest) of these, and the values
// by them. Keys of the whole step lie in panels; scores lie by their place in the chunk, so that other chunks change no
// sum.
void attend_all(Engine& e, const Operation& o, int thread, int piece) {
    const Block& b = e.batches[piece % e.batch_count];
    const int head = piece / e.batch_count, rows = e.step.rows, panels = panels_of(rows), low = low_of(o, b);
    const int count = high_of(o, b) - low, width = panels_of(count) * PANEL, first = low / PANEL, far = o.distance_count / 2;
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to];
    const float *keys = e.keys + (int64_t)head * panels * o.size * PANEL, *values = e.values + (int64_t)head * panels_of(o.size) * rows * PANEL;
    float *scores = e.own[thread], inverse[BATCH];
    const Matrix by_keys{FLOAT32, o.size, rows, panels, (const uint8_t*)keys, nullptr};
    const float* queries = from.data + (int64_t)b.row * from.width + head * o.size;
    multiply<Float32>(by_keys, first, panels_of(low + count) - first, 0, queries, from.width, b.rows, [&](int p, int row, float* found, float*) {
        float* own = scores + row * width;
        const int start = p * PANEL - low;
        if (start >= 0 && start + PANEL <= count)
            for (int i = 0; i < PANEL; i += VL) store(own + start + i, load(found + i) * o.scale);
        else
            for (int i = most(0, -start); i < least(PANEL, count - start); i++) own[start + i] = found[i] * o.scale;
    });
    if (o.places) add_places(e, o, b, head, low, count, scores, width);
    for (int r = 0; r < b.rows; r++) {
        float* own = scores + r * width;
        const int behind = low - b.row - r;  // from the row to the first key
        for (int i = 0; o.distances && i < count; i++)
            own[i] += o.distances[head * o.distance_count + most(-far, least(far, behind + i)) + far];
        for (int i = 0; o.window && i < -behind - o.window + 1; i++) own[i] = -INFINITE;
        for (int i = o.window ? least(count, o.window - behind) : count; i < width; i++) own[i] = -INFINITE;
        V top = all(-INFINITE), sum = {};
        for (int i = 0; i < width; i += VL) {
            const V s = load(own + i);
            top = s > top ? s : top;
        }
        float largest = top[0];
        for (int i = 1; i < VL; i++) largest = top[i] > largest ? top[i] : largest;
        for (int i = 0; i < width; i += VL) {
            const V s = load(own + i), weight = s == -INFINITE ? (V){} : exponential(s - largest);
            store(own + i, weight);
            sum += weight;
        }
        inverse[r] = 1.0f / total(sum);
    }
    for (int at = 0; at < o.size; at += PANEL) {
        const float* own = values + ((int64_t)at / PANEL * rows + low) * PANEL;
        const Matrix by_values{FLOAT32, count, PANEL, 1, (const uint8_t*)own, nullptr};
        multiply<Float32>(by_values, 0, 1, 0, scores, width, b.rows, [&](int, int row, float* found, float*) {
            float* target = to.data + (int64_t)(b.row + row) * to.width + head * o.size + at;
            const int left = least(PANEL, o.size - at);
            for (int i = 0; i < left; i += VL) store_upto(target + i, load(found + i) * inverse[row], left - i);
        });
    }
}

// A batch of a chunk's rows, and a panel of their numbers: by those of the rows around, first to last
void convolve(Engine& e, const Operation& o, int piece) {
    const Block& b = e.batches[piece % e.batch_count];
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to];
    const int width = from.width, end = b.table + b.length, panel = piece / e.batch_count * PANEL;
    for (int c = panel; c < least(width, panel + PANEL); c += VL)
        for (int row = b.row; row < b.row + b.rows; row++) {
            V sum = load(o.shift + c);
            const int first = row - o.window;
            for (int at = most(first, b.table); at < least(first + o.distance_count, end); at++)
                sum = fuse(load(from.data + (int64_t)at * width + c), load(o.gain + (at - first) * width + c), sum);
            store(to.data + (int64_t)row * to.width + c, activated(sum, o.activation));
        }
}

int attention_pieces(const Engine& e, const Operation& o) {
    if (!e.split) return e.block_count * o.kv_heads;
    int count = 0;
    for (int b = 0; b < e.block_count; b++) count += spans_of(e, o, e.blocks[b]) * o.kv_heads;
    return count;
}

// ---------------------------------------------------------------- tokens

// The weights of a row's token
void look_up(const Engine& e, const Operation& o, int row) {
    const Matrix& m = *o.matrix;
    const int panel = e.step.tokens[row] / PANEL, lane = e.step.tokens[row] % PANEL;
    float* to = e.model.buffers[o.to].data + (int64_t)row * e.model.buffers[o.to].width;
    const uint8_t* at = m.weights + panel * panel_bytes(m);
    const float* added = o.shift ? o.shift + (int64_t)e.step.positions[row] * m.inputs : nullptr;
    const float* typed = o.gain ? o.gain + (int64_t)(e.step.types ? e.step.types[row] : 0) * m.inputs : nullptr;
    for (int i = 0; i < m.inputs; i++) {
        if (m.format == INT8) {
            const uint8_t* group = at + i / GROUP * GROUP_BYTES;
            to[i] = (int8_t)group[(4 + i % GROUP / 4 * 4) * PANEL + 4 * lane + i % 4] * ((const float*)group)[lane] * o.scale;
        } else {
            const int size = m.format == FLOAT32 ? 4 : 2, first = lane / VL * VL;  // a vector, of which one is wanted
            const uint8_t* vector = at + ((int64_t)i * PANEL + first) * size;
            const V wide = m.format == FLOAT32 ? Float32::widen(vector) : m.format == FLOAT16 ? Float16::widen(vector) : Bfloat16::widen(vector);
            to[i] = wide[lane - first] * o.scale;
        }
        if (typed) to[i] += typed[i];
        if (added) to[i] += added[i];
    }
}

// The largest number and the sum of e^(number - largest); without any, or of -infinity alone, that sum is 0.
struct Mass { float largest; double sum; };
Mass mass_of(const float* x, int count) {
    V top = all(-INFINITE);
    for (int i = 0; i < count; i += VL) {
        V v = load_upto(x + i, count - i);
        for (int j = count - i; j < VL; j++) v[j] = -INFINITE;
        top = v > top ? v : top;
    }
    Mass found{top[0], 0.0};
    for (int i = 1; i < VL; i++) found.largest = top[i] > found.largest ? top[i] : found.largest;
    if (found.largest == -INFINITE) return found;
    for (int from = 0; from < count; from += SUM) {
        V part = {};
        for (int i = from; i < least(count, from + SUM); i += VL) {
            V v = load_upto(x + i, count - i);
            for (int j = count - i; j < VL; j++) v[j] = -INFINITE;
            part += v == -INFINITE ? (V){} : exponential(v - found.largest);
        }
        found.sum += total(part);
    }
    return found;
}

inline float log_of(double sum) { return (float)__builtin_log(sum); }

bool is_broken(const float* x, int count) {  // NaN, or infinity
    V broken = {};
    for (int i = 0; i < count; i += VL) {
        const V v = load_upto(x + i, count - i);
        broken += v < INFINITE ? (V){} : v - v;
    }
    return !(total(broken) == 0.0f);
}

// Changes of single logits, and what is not allowed becomes -infinity
void edit(const Step& s, const Draw& d, float* x, int count) {
    for (const Edit* one = s.edits + d.edits; one < s.edits + d.edits + d.edit_count; one++) {
        float& at = x[one->token];
        if (one->change == ADDED) at += one->value;
        else if (one->change == SCALED) at = at < 0.0f ? at * one->value : at / one->value;
        else at = one->value;
    }
    for (const int32_t* ban = s.bans + 2 * d.bans; ban < s.bans + 2 * (d.bans + d.ban_count); ban += 2)
        for (int i = ban[0]; i < ban[1]; i++) x[i] = -INFINITE;
    if (d.timestamps) {
        const Mass before = mass_of(x, d.timestamps), from = mass_of(x + d.timestamps, count - d.timestamps);
        if (from.sum > 0.0 && from.largest + log_of(from.sum) > before.largest)
            for (int i = 0; i < d.timestamps; i++) x[i] = -INFINITE;
    }
    for (int i = 0; d.allowed >= 0 && i < count; i++)
        if (!(s.allowed[d.allowed + i / 8] >> i % 8 & 1)) x[i] = -INFINITE;
}

// The largest numbers, falling, with what is added to them; the first of equal ones first
void find_largest(const float* x, int count, float added, Found* found, int wanted) {
    int have = 0;
    float last = -INFINITE;  // of those that are found, once they are all
    for (int i = 0; wanted && i < count; i += VL) {
        V v = load_upto(x + i, count - i) + added;
        for (int j = count - i; j < VL; j++) v[j] = -INFINITE;
        bool any = false;
        for (int j = 0; j < VL; j++) any |= v[j] > last;
        for (int j = 0; any && j < VL; j++) {
            if (!(v[j] > last)) continue;
            int at = have < wanted ? have++ : wanted - 1;
            for (; at > 0 && found[at - 1].score < v[j]; at--) found[at] = found[at - 1];
            found[at] = {i + j, v[j], 0.0f};
            if (have == wanted) last = found[wanted - 1].score;
        }
    }
    for (; have < wanted; have++) found[have] = {-1, -INFINITE, -INFINITE};
}

// What a row's draw asks for; see `Draw`. The first of equal tokens is the likeliest.
void choose(Engine& e, int thread, int row) {
    const Buffer& b = e.model.buffers[e.model.buffer_count - 1];
    float* x = b.data + (int64_t)row * b.width;
    const int count = b.width;
    Draw& d = e.step.draws[row];
    if (d.choice == NOTHING && !d.asked) return;
    Found *asked = e.step.found + d.found, *found = asked + d.asked;
    const int wanted = d.found_count - d.asked;
    d.token = 0;
    d.logprob = __builtin_nanf("");
    if (is_broken(x, count)) {
        for (int i = 0; i < d.found_count; i++) asked[i].score = asked[i].logprob = d.logprob;
        return;
    }
    if (d.asked || d.choice == BEAM) {
        const Mass whole = mass_of(x, count);
        const float log_sum = log_of(whole.sum);
        for (int i = 0; i < d.asked; i++) asked[i].logprob = x[asked[i].token] - whole.largest - log_sum;
        for (int i = 0; d.choice == BEAM && i < count; i++) x[i] = x[i] - whole.largest - log_sum;
    }
    if (d.choice == NOTHING) return;
    edit(e.step, d, x, count);
    const Mass left = mass_of(x, count);
    const float log_sum = log_of(left.sum);
    find_largest(x, count, d.total, found, left.sum > 0.0 ? wanted : 0);
    for (int i = 0; i < wanted; i++) {
        if (!(left.sum > 0.0)) found[i].token = -1;
        if (found[i].token >= 0) found[i].logprob = x[found[i].token] - left.largest - log_sum;
    }
    d.token = -1;
    if (d.choice == BEAM || !(left.sum > 0.0)) return;
    for (d.token = 0; d.token < count - 1 && x[d.token] != left.largest;) d.token++;
    double* chances = (double*)e.own[thread];
    if (d.temperature > 0.0) d.token = draw(x, count, left.largest, d, chances, (int32_t*)(chances + count));
    d.logprob = x[d.token] - left.largest - log_sum;
}

// A layer of a page that is copied
void copy_page(Engine& e, int piece) {
    const Model& m = e.model;
    const int32_t* pair = e.step.copies + 2 * (piece / m.layers);
    const size_t size = (size_t)m.page_size * 2 * m.kv_width * bytes_of(m.kv_format);
    __builtin_memcpy(page_of(m, piece % m.layers, pair[1]), page_of(m, piece % m.layers, pair[0]), size);
}

// ---------------------------------------------------------------- phases

Share share_of(const Engine& e, int phase) {
    if (phase == 0) return {e.step.copy_count * e.model.layers, 1};
    const int index = phase - 1;
    if (index == 2 * e.model.count) return {e.step.draws && e.step.part == WHOLE ? e.step.wanted_count : 0, 1};
    const Operation& o = e.model.operations[index / 2];
    const int rows = rows_of(e, o);
    const bool head = index / 2 == e.model.count - 1;
    if (head ? e.step.part == HEADLESS : e.step.part == HEAD) return {0, 1};
    if (index % 2 == 0 && o.kind == ATTEND_ALL) return {o.heads * panels_of(rows), 4};
    if (index % 2 == 0) return {o.kind == LINEAR && is_prepared(o) && rows > own_rows(o) ? rows : 0, BLOCK};
    if (o.kind == CONVOLVE) return {e.batch_count * panels_of(e.model.buffers[o.from].width), 1};
    if (o.kind == ATTEND_ALL) return {o.heads * e.batch_count, e.batch_count > BLOCK ? 4 : 1};
    if (o.kind == TURN) return {e.block_count, 1};
    if (o.kind == ATTEND) return {attention_pieces(e, o), 1};
    if (o.kind == CROSS) return {e.slot_count * o.heads, 1};
    if (o.kind == LOOKUP && !e.step.tokens) return {0, 1};
    if (o.kind != LINEAR) return {rows, BLOCK};
    // of few rows some 64 kB of weights; of many, one panel is much work
    const size_t bytes = panel_bytes(*o.matrix);
    const int bands = (rows + BAND - 1) / BAND;  // one after the other
    return {bands * pieces_of(o), rows > BLOCK ? 1 : most(2, (int)(65536 / bytes) & ~1)};
}

void run(Engine& e, int number, int thread, uint32_t round) {
    const int index = number - 1;
    Phase& phase = e.phases[number];
    if (number == 0 || index == 2 * e.model.count)
        return share(e, phase, thread, round, [&](int first, int count) {
            for (int at = first; at < first + count; at++) number ? choose(e, thread, at) : copy_page(e, at);
        });
    const Operation& o = e.model.operations[index / 2];
    if (o.kind == LINEAR && index % 2) return linear(e, o, phase, thread, round);
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to];
    share(e, phase, thread, round, [&](int first, int count) {
        for (int at = first; at < first + count; at++) {
            if (o.kind == LINEAR) {
                prepare_row(e, o, at, e.own[thread], e.ready + at * stride_of(e, o));
            } else if (o.kind == TURN) {
                turn(e, o, at);
            } else if (o.kind == ATTEND) {
                e.split ? attend_part(e, o, thread, at) : attend_whole(e, o, thread, at);
            } else if (o.kind == CROSS) {
                attend_cross(e, o, thread, at);
            } else if (o.kind == CONVOLVE) {
                convolve(e, o, at);
            } else if (o.kind == ATTEND_ALL) {
                index % 2 ? attend_all(e, o, thread, at) : gather(e, o, at);
            } else if (o.kind == LOOKUP) {
                look_up(e, o, at);
            } else if (o.kind == NORM) {
                normalize(o, row_of(e, o, at), to.data + (int64_t)at * to.width, from.width);
            } else {  // the norm of what is read is added
                float *x = from.data + (int64_t)at * from.width, *y = to.data + (int64_t)at * to.width;
                normalize(o, x, x, from.width);
                for (int i = 0; i < from.width; i += VL) store(y + i, load(y + i) + load(x + i));
            }
        }
    });
}

}  // namespace

Code code() { return {share_of, run}; }
}  // namespace LEVEL
