// A part of compute.cpp, which includes it once for each instruction set: embeddings of tokens, and what is chosen of logits.
// The weights of a row's token
void look_up(const Engine& e, const Operation& o, int row) {
    const Matrix& m = *o.matrix;
    const int own = o.wanted == 1 ? e.step.wanted[row] : row, panel = e.step.tokens[own] / PANEL, lane = e.step.tokens[own] % PANEL;
    float* to = e.model.buffers[o.to].data + (int64_t)row * e.model.buffers[o.to].width;
    const uint8_t* at = is_int8(m.format) ? nullptr : m.weights + panel * panel_bytes(m);
    const float* added = o.shift ? o.shift + (int64_t)e.step.positions[own] * m.inputs : nullptr;
    const float* typed = o.gain ? o.gain + (int64_t)(e.step.types ? e.step.types[own] : 0) * m.inputs : nullptr;
    if (is_int8(m.format)) {
        int own_panel = panel;
        const Section s = section_of(m, own_panel);
        unpack(s.packing, s.weights + own_panel * packed_bytes(s.packing, m.inputs), lane, m.inputs, to);
    }
    for (int i = 0; i < m.inputs; i++) {
        if (is_int8(m.format)) {
            to[i] *= o.scale;
        } else if (m.format == PAIRS) {
            const uint16_t bits[2] = {0, ((const uint16_t*)at)[(i / 2 * PANEL + lane) * 2 + i % 2]};
            __builtin_memcpy(to + i, bits, 4);
            to[i] *= o.scale;
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
    const size_t size = (size_t)m.page_size * m.kv[piece % m.layers].width * bytes_of(m.kv_format);
    if (size) __builtin_memcpy(page_of(m, piece % m.layers, pair[1]), page_of(m, piece % m.layers, pair[0]), size);
}
