// A part of compute.cpp, which includes it once for each instruction set: a matrix by some rows, in float32, 16 bits and int8.
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
                    for (int r = 0; r < R; r++) sums[p][v][r] = W::add(wide[p][v], W::spread(x + r * stride + k), sums[p][v][r]);
            }
            w[p] += PANEL * W::BYTES;
        }
        if (P * N > R) continue;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const V input = W::spread(x + r * stride + k);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++)
#pragma GCC unroll 16
                for (int v = 0; v < N; v++) sums[p][v][r] = W::add(wide[p][v], input, sums[p][v][r]);
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

template <class W, int R>
inline void tile(const uint8_t* const* w, int count, const float* x, int64_t stride, int rows, float* out, bool add, Fetch fetch) {
    if constexpr (R > 1) {
        if (rows < R) return tile<W, R - 1>(w, count, x, stride, rows, out, add, fetch);
    }
    block<W, 1, R>(w, count, x, stride, out, add, fetch);
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
            tile<typename W::Wide, ROWS>(&w, count, x + row * stride + start, stride, taken, out + row * PANEL, start > 0, fetch);
            row += taken;
        }
    }
}

struct Nothing {
    void operator()(int, int) const {}
};

// Panels of `m` for all rows. `each(panel, row, values, gated)`: what becomes of PANEL outputs of a row, and of those
// of the panel `apart` from it, where there is one. `ahead(panel, row)`: what `each` will read and write
// is fetched, unless rows are few.
template <class W, class Each, class Ahead = Nothing>
inline void multiply(const Matrix& m, int panel, int count, int apart, const float* x, int64_t stride, int rows, Each each, Ahead ahead = {}) {
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
            for (int r = 0; r < taken; r++) ahead(p, row + r);
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
#elif defined(VNNI)
constexpr int ROWS8 = 2;
#else
constexpr int ROWS8 = 3;
#endif
constexpr int RAISED = 128;
// A group of weights, whose scales are of format S
template <class S>
constexpr size_t GROUP_BYTES = PANEL * (S::BYTES + GROUP);

inline size_t panel_bytes(const Matrix& m) {
    if (is_int8(m.format)) return groups_of(m.inputs) * (m.format == INT8 ? GROUP_BYTES<Float32> : GROUP_BYTES<Float16>);
    if (m.format == PAIRS) return (size_t)pairs_of(m.inputs) * PANEL * 4;
    return (size_t)m.inputs * PANEL * bytes_of(m.format);
}

// The nearest whole numbers; 0 for NaN
inline VI whole_of(V x) {
    const V finite = x == x ? x : (V){};
    return __builtin_convertvector((finite + 12582912.0f) - 12582912.0f, VI);
}

// A row in pairs
void pair(const float* x, int width, uint8_t* to) {
    narrow<Bfloat16>(x, width, to);
    if (width % 2) __builtin_memset(to + 2 * width, 0, 2);
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
            const VI whole = whole_of(load_upto(x + i, end - i) * inverse);
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
#if defined(__AVX512VNNI__) || defined(VNNI)
// GCC keeps the sums of its own function for it in memory, and is half as fast
inline void dot(VI& sums, VI weights, VI inputs) {
#if defined(__AVX512VNNI__) || defined(EVEX)  // for a test on a processor without AVX-VNNI, whose encoding is another one
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(inputs));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(inputs));
#endif
}

template <class S, int R>
void tile8(const Matrix& m, int panel, const uint8_t* x, size_t stride, float* out, int line, int end) {
    typedef int32_t Quad __attribute__((aligned(4), may_alias));
    const int groups = groups_of(m.inputs);
    const size_t of_panel = groups * GROUP_BYTES<S>;
    const uint8_t *w = m.weights + panel * of_panel, *scale = x + (size_t)groups * GROUP, *added = scale + 4 * (size_t)groups;
    const VI none = {}, raised = (int32_t)(0x01010101u * RAISED) - none;
    V totals[R][PARTS] = {};
    for (int g = 0; g < groups; g++, w += GROUP_BYTES<S>, x += GROUP, scale += 4, added += 4) {
        for (int at = line; at < end; at++) __builtin_prefetch(w + of_panel + 64 * at, 0, 2);
        VI sums[R][PARTS];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (auto& sum : sums[r]) sum = *(const Quad*)(added + r * stride) - none;
#pragma GCC unroll 8
        for (int k = 0; k < GROUP; k += 4) {
            VI weights[PARTS];
#pragma GCC unroll 4
            for (int v = 0; v < PARTS; v++) weights[v] = *(const VI*)(w + (S::BYTES + k) * PANEL + 4 * VL * v) ^ raised;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const VI inputs = *(const Quad*)(x + r * stride + k) - none;
#pragma GCC unroll 4
                for (int v = 0; v < PARTS; v++) dot(sums[r][v], weights[v], inputs);
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++) {
            const V scales = S::widen(w + S::BYTES * VL * v);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const V both = scales * all(*(const float*)(scale + r * stride));
                totals[r][v] = fuse(__builtin_convertvector(sums[r][v], V), both, totals[r][v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PARTS; v++) store(out + r * PANEL + VL * v, totals[r][v]);
}
#else
template <class S, int R>
void tile8(const Matrix& m, int panel, const uint8_t* x, size_t stride, float* out, int line, int end) {
    const int groups = groups_of(m.inputs);
    const uint8_t* w = m.weights + panel * groups * GROUP_BYTES<S>;
    for (int i = 0; i < R * PANEL; i++) out[i] = 0.0f;
    for (int g = 0; g < groups; g++, w += GROUP_BYTES<S>) {
        for (int at = line; at < end; at++) __builtin_prefetch(w + groups * GROUP_BYTES<S> + 64 * at, 0, 2);
        float scales[PANEL];
        for (int i = 0; i < PANEL; i += VL) store(scales + i, S::widen(w + S::BYTES * i));
        const uint8_t* values = w + S::BYTES * PANEL;
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

template <class S, int R>
inline void any_rows8(const Matrix& m, int panel, const uint8_t* x, size_t stride, int rows, float* out, int line, int end) {
    if constexpr (R > 1) {
        if (rows < R) return any_rows8<S, R - 1>(m, panel, x, stride, rows, out, line, end);
    }
    tile8<S, R>(m, panel, x, stride, out, line, end);
}

// As `multiply`, of rows in int8
template <class S, class Each, class Ahead = Nothing>
inline void multiply8(const Matrix& m, int panel, int count, int apart, const uint8_t* x, size_t stride, int rows, Each each, Ahead ahead = {}) {
    constexpr int LINES = GROUP_BYTES<S> / 64;
    alignas(64) float out[2 * ROWS8 * PANEL];
    const int tiles = (rows + ROWS8 - 1) / ROWS8;
    for (int p = panel; p < panel + count; p++)
        for (int t = 0, row = 0; t < tiles; t++) {
            const int taken = (rows - row + tiles - t - 1) / (tiles - t), line = LINES * t / tiles, end = LINES * (t + 1) / tiles;
            const uint8_t* from = x + row * stride;
            for (int r = 0; r < taken; r++) ahead(p, row + r);
            any_rows8<S, ROWS8>(m, p, from, stride, taken, out, line, end);
            if (apart) any_rows8<S, ROWS8>(m, p + apart, from, stride, taken, out + taken * PANEL, line, end);
            for (int r = 0; r < taken; r++) each(p, row + r, out + r * PANEL, out + (taken + r) * PANEL);
            row += taken;
        }
}
