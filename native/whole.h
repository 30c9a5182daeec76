// A part of compute.cpp, which includes it once for each instruction set: attention and convolutions over all rows of a chunk.
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
