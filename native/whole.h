// A part of compute.cpp, which includes it once for each instruction set: attention and convolutions over all rows of a chunk.
// A row's key of a head; its value is `heads` further
inline const float* key_of(const Engine& e, const Operation& o, int row, int head) {
    return e.model.buffers[o.from].data + (int64_t)row * e.model.buffers[o.from].width + (o.heads + head) * o.size;
}

// Whether a chunk's keys and values are quantized, and so are the queries and weights that they are multiplied with. That
// depends on the chunk alone, and so do their bits.
inline bool is_quantized(const Operation& o, const Block& b) { return o.quantized && o.size >= GROUP && b.length >= LONG; }

// Where these keys lie, [rows / 32][groups of the size], and these values, [rows / 32] from number `at` on, all groups of
// PANEL outputs as in a matrix: in place of the first panel of the step's rows that has the chunk's alone, and those
// behind it, which are larger.
inline uint8_t* keys_of(const Engine& e, const Operation& o, const Block& b, int head) {
    const int64_t before = (int64_t)head * panels_of(e.step.rows) + panels_of(b.table);
    return (uint8_t*)(e.keys + before * o.size * PANEL);
}
inline uint8_t* values_of(const Engine& e, const Operation& o, const Block& b, int head, int at) {
    const int64_t before = ((int64_t)head * panels_of(o.size) + at / PANEL) * e.step.rows + panels_of(b.table) * PANEL;
    return (uint8_t*)(e.values + before * PANEL);
}

// The keys and values of a head and of PANEL rows of a long chunk, from row `start` of it on; those of no row are zero.
void gather_quantized(Engine& e, const Operation& o, const Block& b, int head, int start, uint8_t* room) {
    const int count = least(PANEL, b.length - start), groups = groups_of(o.size), first = b.table + start;
    uint8_t* keys = keys_of(e, o, b, head) + (size_t)(start / PANEL) * groups * GROUP_BYTES;
    for (int i = 0; i < PANEL; i++) {
        if (i < count) quantize(key_of(e, o, first + i, head), o.size, room);
        else __builtin_memset(room, 0, quantized_bytes(o.size));
        for (int g = 0; g < groups; g++) {
            uint8_t* to = keys + g * GROUP_BYTES;
            ((float*)to)[i] = ((const float*)(room + (size_t)groups * GROUP))[g];
            for (int k = 0; k < GROUP; k += 4) __builtin_memcpy(to + (4 + k) * PANEL + 4 * i, room + g * GROUP + k, 4);
        }
    }
    for (int at = 0; at < o.size; at += VL) {
        uint8_t* to = values_of(e, o, b, head, at) + (size_t)(start / PANEL) * GROUP_BYTES + at % PANEL * 4;
        V values[GROUP];
        VI top = {};
        for (int i = 0; i < GROUP; i++) {
            values[i] = i < count ? load_upto(key_of(e, o, first + i, head) + o.heads * o.size + at, o.size - at) : (V){};
            const VI size = (VI)values[i] & 0x7fffffff;
            top = size > top ? size : top;
        }
        const V largest = (V)top, inverse = largest > 1e-30f ? 127.0f / largest : (V){};
        store((float*)to, largest / 127.0f + (largest - largest));
        for (int k = 0; k < GROUP; k += 4) {
            VI four = {};
            for (int i = 0; i < 4; i++) four |= (whole_of(values[k + i] * inverse) & 255) << 8 * i;
            __builtin_memcpy(to + (4 + k) * PANEL, &four, sizeof four);
        }
    }
}

// The batch that has a row
inline const Block& batch_of(const Engine& e, int row) {
    int from = 0;
    for (int to = e.batch_count; to - from > 1;) {
        const int middle = (from + to) / 2;
        (e.batches[middle].row <= row ? from : to) = middle;
    }
    return e.batches[from];
}

// The keys and values of a head and PANEL rows, into panels; those of no row are zero.
void gather(Engine& e, const Operation& o, int thread, int piece) {
    const int rows = e.step.rows, panels = panels_of(rows), head = piece / panels, first = piece % panels * PANEL;
    const Buffer& from = e.model.buffers[o.from];
    const Block& chunk = batch_of(e, first);
    const int end = chunk.table + chunk.length;
    if (is_quantized(o, chunk) && first >= chunk.table && first + PANEL <= end) {
        const int start = first - panels_of(chunk.table) * PANEL;
        for (int at = start; at == start || (first + 2 * PANEL > end && at < chunk.length); at += PANEL)  // the last one, the rest
            gather_quantized(e, o, chunk, head, at, (uint8_t*)e.own[thread]);
        return;
    }
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
    const bool quantized = is_quantized(o, b);
    const int base = quantized ? b.table : 0;  // of the panels
    const int head = piece / e.batch_count, rows = e.step.rows, panels = panels_of(rows);
    const int low = quantized ? base + (low_of(o, b) - base) / GROUP * GROUP : low_of(o, b), first = (low - base) / PANEL;
    const int count = high_of(o, b) - low, width = panels_of(count) * PANEL, far = o.distance_count / 2;
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to];
    const float *keys = e.keys + (int64_t)head * panels * o.size * PANEL, *values = e.values + (int64_t)head * panels_of(o.size) * rows * PANEL;
    // quantized queries and weights; the latter take the place of the scores before them
    const size_t of_query = quantized_bytes(o.size), of_weights = quantized_bytes(width);
    uint8_t *small_queries = (uint8_t*)e.own[thread], *small_weights = small_queries + quantized * BATCH * of_query;
    float *scores = (float*)(small_weights + quantized * of_weights), inverse[BATCH];
    const float* queries = from.data + (int64_t)b.row * from.width + head * o.size;
    const auto keep = [&](int p, int row, float* found, float*) {
        float* own = scores + row * width;
        const int start = p * PANEL + base - low;
        if (start >= 0 && start + PANEL <= count)
            for (int i = 0; i < PANEL; i += VL) store(own + start + i, load(found + i) * o.scale);
        else
            for (int i = most(0, -start); i < least(PANEL, count - start); i++) own[start + i] = found[i] * o.scale;
    };
    const int seen = panels_of(low - base + count) - first;
    if (quantized) {
        for (int r = 0; r < b.rows; r++) quantize(queries + (int64_t)r * from.width, o.size, small_queries + r * of_query);
        const Matrix by_keys{INT8, o.size, b.length, panels_of(b.length), keys_of(e, o, b, head), nullptr};
        multiply8(by_keys, first, seen, 0, small_queries, of_query, b.rows, keep);
    } else {
        const Matrix by_keys{FLOAT32, o.size, rows, panels, (const uint8_t*)keys, nullptr};
        multiply<Float32>(by_keys, first, seen, 0, queries, from.width, b.rows, keep);
    }
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
        if (quantized) quantize(own, width, small_weights + r * of_weights);
    }
    for (int at = 0; at < o.size; at += PANEL) {
        const auto finish = [&](int, int row, float* found, float*) {
            float* target = to.data + (int64_t)(b.row + row) * to.width + head * o.size + at;
            const int left = least(PANEL, o.size - at);
            for (int i = 0; i < left; i += VL) store_upto(target + i, load(found + i) * inverse[row], left - i);
        };
        if (quantized) {
            const Matrix by_values{INT8, width, PANEL, 1, values_of(e, o, b, head, at) + (size_t)first * GROUP_BYTES, nullptr};
            multiply8(by_values, 0, 1, 0, small_weights, of_weights, b.rows, finish);
            continue;
        }
        const float* own = values + ((int64_t)at / PANEL * rows + low) * PANEL;
        const Matrix by_values{FLOAT32, count, PANEL, 1, (const uint8_t*)own, nullptr};
        multiply<Float32>(by_values, 0, 1, 0, scores, width, b.rows, finish);
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
