// A part of compute.cpp, which includes it once for each instruction set: attention over pages and over slots.
// ---------------------------------------------------------------- pages

inline uint8_t* page_of(const Model& m, int layer, int page) {
    return m.kv[layer].pages + (int64_t)page * m.page_size * m.kv[layer].width * bytes_of(m.kv_format);
}

inline int value_size(const Operation& o) { return o.value_size ? o.value_size : o.size; }

// How many numbers behind the keys of a head its values are
inline int64_t values_behind(const Operation& o, int head) {
    return (int64_t)o.kv_heads * o.size + (int64_t)head * (value_size(o) - o.size);
}

// Keys of a head at a position
inline uint8_t* key_at(const Engine& e, const Operation& o, const Block& b, int head, int position) {
    const Model& m = e.model;
    const int page = e.step.tables[b.table + position / m.page_size];
    const int64_t number = (int64_t)(position % m.page_size) * m.kv[o.layer].width + head * o.size;
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
    float* own = x;
    x += o.place;
    const int half = o.turned / 2, apart = o.paired ? 1 : half, step = o.paired ? 2 : 1;
    for (int i = 0; i < half; i++) {
        const float a = x[step * i], b = x[step * i + apart];
        x[step * i] = a * cosines[i] - b * sines[i];
        x[step * i + apart] = b * cosines[i] + a * sines[i];
    }
    if (scale != 1.0f)
        for (int i = 0; i < o.size; i += VL) store_upto(own + i, load_upto(own + i, o.size - i) * scale, o.size - i);
}

void turn(Engine& e, const Operation& o, int block) {
    const Block& b = e.blocks[block];
    const Model& m = e.model;
    for (int row = b.row; row < b.row + b.rows; row++) {
        const int position = e.step.positions[row];
        const float *cosines = nullptr, *sines = nullptr;
        if (o.turned) {
            const Turns& t = m.turns[o.table];
            const bool own = e.step.cosines;
            const int64_t at = (int64_t)(own ? row : position) * t.half;
            cosines = (own ? e.step.cosines : t.cosines) + at;
            sines = (own ? e.step.sines : t.sines) + at;
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
        const int width = o.kv_heads * o.size, values = value_size(o);
        for (int h = 0; o.gain && h < o.kv_heads; h++) norm_heads(o, o.gain, keys + width + h * values, values);
        if (!m.pages || !o.kv_heads) continue;
        uint8_t* to = key_at(e, o, b, 0, position);
        narrow(m.kv_format, keys, width, to);
        narrow(m.kv_format, keys + width, o.kv_heads * values, to + (int64_t)width * bytes_of(m.kv_format));
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

// A query of a chunk, and its part [2 + value_size]: the largest score, the sum of e^(score - largest), and the values by these.
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
    const int size = value_size(o);
    for (int p = first; p < count; p++) values[p] = keys[p] + values_behind * W::BYTES;
    for (int p = 0; p < count; p += VL) {
        for (int i = most(p, first); i < least(p + VL, count); i++)
            for (int at = 0; at < size * W::BYTES; at += 64) {
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
    for (; rows == 1 && from + 4 * VL <= size; from += 4 * VL) weigh<W, 4, 1>(queries, 1, scores, values, first, count, from);
    for (; from + 2 * VL <= size; from += 2 * VL) weigh<W, 2, 4>(queries, rows, scores, values, first, count, from);
    for (; from + VL <= size; from += VL) weigh<W, 1, 4>(queries, rows, scores, values, first, count, from);
    for (int r = 0; from < size && r < rows; r++) {
        V rest = {};
        for (int p = first; p < count; p++) rest = fuse(all(scores[r][p]), read_upto<W>(values[p] + from * W::BYTES, size - from), rest);
        store_upto(queries[r].part + 2 + from, rest, size - from);
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

inline int last_seen(const Engine& e, const Operation& o, const Block& b, int r) {
    return e.step.in_windows && !o.window ? position_of(e, b, r) : e.step.seen[b.row + r];
}

// The first span that any row of a block sees, and how many there are to the last
inline int first_span(const Engine& e, const Operation& o, const Block& b) {
    return first_seen(o, position_of(e, b, 0)) / SPAN;
}
inline int spans_of(const Engine& e, const Operation& o, const Block& b) {
    return last_seen(e, o, b, b.rows - 1) / SPAN + 1 - first_span(e, o, b);
}

// The keys of a chunk's positions from `low` on, which begins at `start`; those that are none are their neighbour's.
void find_keys(const Engine& e, const Operation& o, const Block& b, int head, int start, int low, const uint8_t** keys) {
    const int end = least(CHUNK, last_seen(e, o, b, b.rows - 1) + 1 - start), size = e.model.page_size;
    const int64_t row = (int64_t)e.model.kv[o.layer].width * bytes_of(e.model.kv_format);
    for (int p = low; p < end;) {  // page by page
        const uint8_t* at = key_at(e, o, b, head, start + p);
        for (const int stop = least(end, p + size - (start + p) % size); p < stop; p++, at += row) keys[p] = at;
    }
    for (int p = end; p < CHUNK; p++) keys[p] = keys[end - 1];
    for (int p = 0; p < low; p++) keys[p] = keys[low];
}

// One span of the positions of a block's rows, for one head of keys: to parts [rows][group][2 + value_size], of the rows that
// see any of it. Its chunks are joined in order; `room` is for BLOCK more parts.
void attend_span(const Engine& e, const Operation& o, const Block& b, int head, int span, float* parts, float* room) {
    const int group = o.heads / o.kv_heads, length = 2 + value_size(o);
    const Buffer& queries = e.model.buffers[o.from];
    const auto attend = attention_of(e.model);
    const uint8_t* keys[CHUNK];
    const int seen = first_seen(o, position_of(e, b, 0)), last = last_seen(e, o, b, b.rows - 1);
    for (int start = most(seen / CHUNK * CHUNK, span * SPAN); start < (span + 1) * SPAN && start <= last; start += CHUNK) {
        find_keys(e, o, b, head, start, most(0, seen - start), keys);
        for (int r = 0; r < b.rows; r++) {
            const int position = position_of(e, b, r), first = first_seen(o, position);
            const int count = least(CHUNK, last_seen(e, o, b, r) + 1 - start);
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
                attend(o, heads, taken, keys, values_behind(o, head), most(0, first - start), count, position - start, 0);
                for (int h = 0; !begins && h < taken; h++) join(parts + (r * group + g + h) * length, heads[h].part, length - 2);
            }
        }
    }
}

// What a row and head attend to, to its place
inline void write(const Engine& e, const Operation& o, int row, int head, const float* sum) {
    const int size = value_size(o);
    float* to = e.model.buffers[o.to].data + (int64_t)row * e.model.buffers[o.to].width + head * size;
    float inverse = 1.0f / sum[1];
    if (o.kind == ATTEND && o.shift) {  // one more key in the sum of weights
        const float sink = o.shift[head], largest = sink > sum[0] ? sink : sum[0];
        const float own = exponential(all(sum[0] - largest))[0];
        inverse = own / (sum[1] * own + exponential(all(sink - largest))[0]);
    }
    for (int d = 0; d < size; d += VL) store_upto(to + d, load_upto(sum + 2 + d, size - d) * inverse, size - d);
}

// A block and a head of keys
void attend_whole(Engine& e, const Operation& o, int thread, int piece) {
    const Block& b = e.blocks[piece / o.kv_heads];
    const int head = piece % o.kv_heads, group = o.heads / o.kv_heads, length = 2 + value_size(o), each = b.rows * group;
    float *sums = e.own[thread], *parts = sums + each * length, *room = parts + each * length;
    const int begun = first_span(e, o, b);
    for (int span = begun; span < begun + spans_of(e, o, b); span++) {
        attend_span(e, o, b, head, span, parts, room);
        for (int r = 0; r < b.rows; r++) {
            const int first = first_seen(o, position_of(e, b, r)) / SPAN;
            if (first > span || last_seen(e, o, b, r) / SPAN < span) continue;
            for (int i = r * group; i < (r + 1) * group; i++) {
                if (first < span) join(sums + i * length, parts + i * length, length - 2);
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
    const int group = o.heads / o.kv_heads, length = 2 + value_size(o), each = b.rows * group;
    const int64_t of_head = (int64_t)each * length * e.most_spans;
    float* parts = e.parts + ((int64_t)b.row * o.heads * e.most_spans) * length + head * of_head;
    attend_span(e, o, b, head, begun + span, parts + (int64_t)span * each * length, e.own[thread]);
    int32_t* come = e.come + block * o.kv_heads + head;
    if (__atomic_add_fetch(come, 1, __ATOMIC_ACQ_REL) < spans) return;
    __atomic_store_n(come, 0, __ATOMIC_RELAXED);  // for the next layer
    for (int i = 0; i < each; i++) {
        const int first = first_seen(o, position_of(e, b, i / group)) / SPAN - begun;
        const int last = last_seen(e, o, b, i / group) / SPAN - begun;
        float* sum = parts + ((int64_t)first * each + i) * length;
        for (int s = first + 1; s <= last; s++) join(sum, parts + ((int64_t)s * each + i) * length, length - 2);
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

int attention_pieces(const Engine& e, const Operation& o) {
    if (!e.split) return e.block_count * o.kv_heads;
    int count = 0;
    for (int b = 0; b < e.block_count; b++) count += spans_of(e, o, e.blocks[b]) * o.kv_heads;
    return count;
}
