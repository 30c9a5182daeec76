// A part of compute.cpp, which includes it once for each instruction set: a matrix by some rows, in float32, in 16 bits, and quantized.
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

// ---------------------------------------------------------------- products of quantized weights

#if defined(__AVX512VNNI__)
constexpr int ROWS8 = 6;
#elif defined(VNNI)
constexpr int ROWS8 = 2;
#else
constexpr int ROWS8 = 3;
#endif

inline Section section_of(const Matrix& m, int& panel) {
    if (m.format != PACKED) return {m.format == INT8 ? Q8_32 : Q8_0, m.panels, m.weights};
    const Section* s = m.sections;
    while (panel >= s->panels) panel -= s++->panels;
    return *s;
}
inline size_t panel_bytes(const Matrix& m) {  // of the first panel, if they differ
    int first = 0;
    if (is_int8(m.format)) return packed_bytes(section_of(m, first).packing, m.inputs);
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

// A row in int8, each group by the scale of its largest value, with the sums of its halves. In two `planes` the values
// have 16 bits: a value of the first row counts 255 times, so that none of the second is -128, which has no other sign. `order`: the
// input that is each value; or none, and they stay as they are.
void quantize(const float* x, int width, uint8_t* to, int planes = 1, const int32_t* order = nullptr) {
    const int groups = groups_of(width);
    const float most = planes > 1 ? 127.0f * 255.0f : 127.0f;
    int8_t* values = (int8_t*)to;
    float* scales = (float*)(to + (size_t)groups * GROUP);
    int32_t* sums = (int32_t*)(scales + groups);
    const size_t apart = quantized_bytes(width);
    for (int g = 0; g < groups; g++) {
        const int begin = g * GROUP, count = least(GROUP, width - begin);
        float some[GROUP];
        for (int i = 0; order && i < count; i++) some[i] = x[order[begin + i]];
        const float* own = order ? some : x + begin;
        VI top = {};  // bits of sizes: those of infinity and NaN are the largest, and come out as NaN
        for (int i = 0; i < count; i += VL) {
            const VI size = (VI)load_upto(own + i, count - i) & 0x7fffffff;
            top = size > top ? size : top;
        }
        const int32_t bits = largest_of(top);
        float largest;
        __builtin_memcpy(&largest, &bits, 4);
        const float inverse = largest > 1e-30f ? most / largest : 0.0f;  // of less the inverse may be infinite
        const float scale = largest / most + (largest - largest);
        typedef int8_t B __attribute__((vector_size(VL), aligned(1), may_alias));
        for (int half = 0; half < 2; half++) {
            VI high = {}, low = {};
            for (int i = half * GROUP / 2; i < (half + 1) * GROUP / 2; i += VL) {
                const VI whole = i < count ? whole_of(load_upto(own + i, count - i) * inverse) : (VI){};
                const VI upper = planes > 1 ? whole_of(__builtin_convertvector(whole, V) * (1.0f / 255.0f)) : whole, lower = whole - 255 * upper;
                *(B*)(values + begin + i) = __builtin_convertvector(upper, B);
                high += upper;
                if (planes == 1) continue;
                *(B*)(values + apart + begin + i) = __builtin_convertvector(lower, B);
                low += lower;
            }
            sums[2 * g + half] = total(high);
            if (planes > 1) ((int32_t*)((uint8_t*)sums + apart))[2 * g + half] = total(low);
        }
        scales[g] = planes > 1 ? scale * 255.0f : scale;
        if (planes > 1) *(float*)((uint8_t*)(scales + g) + apart) = scale;
    }
}

// Sums of products of four bytes of a weight's output by four of a row. VNNI multiplies bytes without a sign by bytes
// with one, so weights with a sign are made 128 larger. AVX2 does so, too, and adds two products in 16 bits: the signs
// of weights that may be large go over to the inputs.
#if defined(__AVX512VNNI__) || defined(VNNI)
constexpr int RAISED = 128;
// GCC keeps the sums of its own function for it in memory, and is half as fast
template <bool SIGNED>
inline void dot(VI& sums, VI weights, VI inputs) {
#if defined(__AVX512VNNI__) || defined(EVEX)  // for a test on a processor without AVX-VNNI, whose encoding is another one
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(inputs));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(inputs));
#endif
}
#elif defined(__AVX2__)
constexpr int RAISED = 0;
template <bool SIGNED>
inline void dot(VI& sums, VI weights, VI inputs) {
    __m256i w = (__m256i)weights, x = (__m256i)inputs;
    if (SIGNED) x = _mm256_sign_epi8(x, w), w = _mm256_abs_epi8(w);
    sums += (VI)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));  // below 2^15
}
#else
constexpr int RAISED = 0;
template <bool SIGNED>
inline void dot(VI& sums, VI weights, VI inputs) {
    typedef int16_t HI __attribute__((vector_size(4 * VL)));
    const HI even = ((HI)weights << 8 >> 8) * ((HI)inputs << 8 >> 8), odd = ((HI)weights >> 8) * ((HI)inputs >> 8);
    sums += ((VI)even << 16 >> 16) + ((VI)even >> 16) + ((VI)odd << 16 >> 16) + ((VI)odd >> 16);
}
#endif

// Sixteen numbers by their places, of which each byte has one
template <int P>
inline VI placed(VI places) {
    constexpr int RAISE = P == MXFP4 ? 12 : RAISED;
    alignas(16) uint8_t table[16];
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)((P == MXFP4 ? FP4[i] : IQ4[i]) + RAISE);
#if defined(__AVX512F__)
    return (VI)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)places);
#elif defined(__AVX2__)
    return (VI)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)places);
#else
    uint8_t bytes[4 * VL];
    __builtin_memcpy(bytes, &places, sizeof bytes);
    for (uint8_t& one : bytes) one = table[one];
    __builtin_memcpy(&places, bytes, sizeof bytes);
    return places;
#endif
}

// What is taken from each number again
template <int P>
constexpr int RAISE = P == MXFP4 ? 12 : P == IQ4_NL || P == IQ4_XS || LAYOUTS[P].bits == 8 ? RAISED : LAYOUTS[P].raised;

// Numbers of inputs 4 * k .. 4 * k + 3, and of vector `v` of outputs
template <int P>
inline VI numbers_of(const uint8_t* numbers, int k, int v) {
    constexpr int BITS = LAYOUTS[P].bits, LINE = 4 * PANEL;
    const uint8_t* at = numbers + 4 * VL * v;
    if constexpr (BITS == 8) return *(const VI*)(at + k * LINE) ^ (VI)((int32_t)(0x01010101u * RAISED) - (VI){});
    const VI both = *(const VI*)(at + k % 4 * LINE), low = (k < 4 ? both : both >> 4) & 0x0f0f0f0f;
    if constexpr (is_placed(P)) return placed<P>(low);
    if constexpr (BITS == 4) return low;
    if constexpr (BITS == 5) {
        const VI high = *(const VI*)(at + 4 * LINE);
        return low | ((k < 4 ? high << (4 - k) : high >> (k - 4)) & 0x10101010);
    }
    const VI high = *(const VI*)(at + (4 + k / 4) * LINE);
    return low | ((k % 4 < 2 ? high << (4 - 2 * (k % 4)) : high >> (2 * (k % 4) - 4)) & 0x30303030);
}

// GCC's own conversion of so few bytes is slow
inline VI bytes_at(const uint8_t* at) {
#if defined(__AVX512F__)
    return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
#elif defined(__AVX2__)
    return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
#else
    typedef uint8_t Some __attribute__((vector_size(VL), aligned(1), may_alias));
    return __builtin_convertvector(*(const Some*)at, VI);
#endif
}
inline V wide_of(VI whole) { return __builtin_convertvector(whole, V); }

// Scales of group `g` of a head, or of a half of it, and what is added to its weights
template <int P>
inline V scales_of(const uint8_t* head, const uint8_t* lead, int g, int half, int v) {
    const int at = VL * v;
    if constexpr (P == Q8_32) return Float32::widen(lead + 4 * at);
    if constexpr (is_int4(P)) return Float32::widen(head + 4 * (g * GROUP / LAYOUTS[P].inputs * PANEL + at));
    if constexpr (P == MXFP4) {
        const VI exponents = bytes_at(head + g * PANEL + at);
        const VI small = exponents < 1 ? 0x00200000 - (VI){} : 0x00400000 - (VI){};
        return (V)(exponents < 2 ? small : (exponents - 1) << 23);
    }
    if constexpr (!LAYOUTS[P].head) return Float16::widen(lead + 2 * at);
    const V whole = Float16::widen(head + 2 * at);
    if constexpr (P == Q6_K) return whole * wide_of(bytes_at(head + 64 + (2 * g + half) * PANEL + at) << 24 >> 24);
    if constexpr (P == IQ4_XS) return whole * wide_of(bytes_at(head + 64 + g * PANEL + at) << 24 >> 24);
    return whole * wide_of(bytes_at(head + 128 + 2 * g * PANEL + at));
}
template <int P>
inline V added_of(const uint8_t* head, const uint8_t* lead, int g, int v) {
    if constexpr (!LAYOUTS[P].head) return Float16::widen(lead + 2 * PANEL + 2 * VL * v);
    if constexpr (is_int4(P)) {
        constexpr int ALL = SUPER * GROUP / LAYOUTS[P].inputs * PANEL;
        const int own = g * GROUP / LAYOUTS[P].inputs * PANEL + VL * v;
        return -(Float32::widen(head + 4 * own) * wide_of(bytes_at(head + 4 * ALL + own)));
    }
    return -(Float16::widen(head + 64 + 2 * VL * v) * wide_of(bytes_at(head + 128 + (2 * g + 1) * PANEL + VL * v)));
}

// One panel, at `w`, by `R` rows, to out [R][PANEL]. The sum of each group, or of its half, is exact; these are added up in
// order. Meanwhile lines [`line`, `end`) of each group of the next panel are fetched.
template <int P, int R>
void tile8(const uint8_t* w, int inputs, const uint8_t* x, size_t stride, float* out, int line, int end) {
    typedef int32_t Quad __attribute__((aligned(4), may_alias));
    constexpr Layout L = LAYOUTS[P];
    constexpr int HALVES = L.halved ? 2 : 1, STEPS = GROUP / 4 / HALVES;
    constexpr bool SIGNED = L.bits == 8 || P == IQ4_NL || P == IQ4_XS;
    const int groups = groups_of(inputs);
    const size_t of_panel = packed_bytes(P, inputs);
    const uint8_t *head = w, *scale = x + (size_t)groups * GROUP, *sums_of = scale + 4 * (size_t)groups;
    const VI none = {};
    V totals[R][PARTS] = {};
    for (int g = 0; g < groups; g++, w += group_bytes(P), x += GROUP, scale += 4, sums_of += 8) {
        if (L.head && g % SUPER == 0) head = w, w += L.head;
        for (int at = line; at < end; at++) __builtin_prefetch(w + of_panel + 64 * at, 0, 2);
        const uint8_t* numbers = w + L.lead;
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; half++) {
            VI sums[R][PARTS];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Quad* two = (const Quad*)(sums_of + r * stride);
                const int32_t taken = -RAISE<P> * (L.halved ? two[half] : two[0] + two[1]);
#pragma GCC unroll 8
                for (auto& sum : sums[r]) sum = RAISE<P> ? taken - none : none;
            }
#pragma GCC unroll 8
            for (int step = 0; step < STEPS; step++) {
                const int k = half * STEPS + step;
                VI weights[PARTS];
#pragma GCC unroll 8
                for (int v = 0; v < PARTS; v++) weights[v] = numbers_of<P>(numbers, k, v);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const VI inputs = *(const Quad*)(x + r * stride + 4 * k) - none;
#pragma GCC unroll 8
                    for (int v = 0; v < PARTS; v++) dot<SIGNED>(sums[r][v], weights[v], inputs);
                }
            }
#pragma GCC unroll 8
            for (int v = 0; v < PARTS; v++) {
                const V scales = scales_of<P>(head, w, g % SUPER, half, v);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const V both = scales * all(*(const float*)(scale + r * stride));
                    totals[r][v] = fuse(__builtin_convertvector(sums[r][v], V), both, totals[r][v]);
                }
            }
        }
        if constexpr (L.adds)
#pragma GCC unroll 8
            for (int v = 0; v < PARTS; v++) {
                const V added = added_of<P>(head, w, g % SUPER, v);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const Quad* two = (const Quad*)(sums_of + r * stride);
                    totals[r][v] = fuse(added, all(*(const float*)(scale + r * stride) * (float)(two[0] + two[1])), totals[r][v]);
                }
            }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PARTS; v++) store(out + r * PANEL + VL * v, totals[r][v]);
}

template <int P, int R>
inline void any_rows8(const uint8_t* w, int inputs, const uint8_t* x, size_t stride, int rows, float* out, int line, int end) {
    if constexpr (R > 1) {
        if (rows < R) return any_rows8<P, R - 1>(w, inputs, x, stride, rows, out, line, end);
    }
    tile8<P, R>(w, inputs, x, stride, out, line, end);
}

// Rows by a panel, whatever its packing is; part `part` of `parts` of the next panel is fetched
void by_panel(const Matrix& m, int panel, const uint8_t* x, size_t stride, int rows, float* out, int part, int parts) {
    const Section s = section_of(m, panel);
    const int lines = (group_bytes(s.packing) + LAYOUTS[s.packing].head / SUPER) / 64, line = lines * part / parts, end = lines * (part + 1) / parts;
    const uint8_t* w = s.weights + panel * packed_bytes(s.packing, m.inputs);
    switch (s.packing) {
#define OF(P) case P: return any_rows8<P, ROWS8>(w, m.inputs, x, stride, rows, out, line, end);
        OF(Q8_32) OF(Q8_0) OF(Q4_0) OF(Q4_1) OF(Q5_0) OF(Q5_1) OF(Q4_K) OF(Q5_K) OF(Q6_K) OF(IQ4_NL) OF(IQ4_XS) OF(MXFP4) OF(INT4_32) OF(INT4_128)
#undef OF
    }
}

// As `multiply`, of rows in int8, or in 16 bits as two such rows, whose products are added
template <class Each, class Ahead = Nothing>
inline void multiply8(const Matrix& m, int panel, int count, int apart, const uint8_t* x, size_t stride, int rows, Each each, Ahead ahead = {}) {
    alignas(64) float out[2 * ROWS8 * PANEL];
    const int planes = planes_of(m), most_rows = ROWS8 / planes, tiles = (rows + most_rows - 1) / most_rows;
    const auto by = [&](int p, const uint8_t* from, int taken, int t, float* to) {
        by_panel(m, p, from, stride / planes, taken * planes, to, t, tiles);
        for (int r = 0; r < taken && planes > 1; r++)
            for (int i = 0; i < PANEL; i += VL) store(to + r * PANEL + i, load(to + 2 * r * PANEL + i) + load(to + (2 * r + 1) * PANEL + i));
    };
    for (int p = panel; p < panel + count; p++)
        for (int t = 0, row = 0; t < tiles; t++) {
            const int taken = (rows - row + tiles - t - 1) / (tiles - t);
            const uint8_t* from = x + row * stride;
            for (int r = 0; r < taken; r++) ahead(p, row + r);
            by(p, from, taken, t, out);
            if (apart) by(p + apart, from, taken, t, out + ROWS8 * PANEL);
            for (int r = 0; r < taken; r++) each(p, row + r, out + r * PANEL, out + ROWS8 * PANEL + r * PANEL);
            row += taken;
        }
}
