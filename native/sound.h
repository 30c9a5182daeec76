// Whether a model is one: each operation stays within the buffers, pages and tables that the model names. How much
// memory there is behind an address only the caller knows.
#pragma once
#include <initializer_list>
#include "engine.h"

static inline bool within(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

static inline bool is_sound(const Matrix* m) {
    if (!m || !within(m->format, FLOAT32, PACKED) || m->inputs <= 0 || m->panels <= 0 || !within(m->outputs, 1, (int64_t)PANEL * m->panels))
        return false;
    if (!within(m->planes, 0, 2)) return false;
    if (m->format != PACKED) return !m->order && m->weights && (uintptr_t)m->weights % 64 == 0;
    int64_t panels = 0;
    for (int i = 0; m->sections && i < m->section_count; i++) {
        const Section& s = m->sections[i];
        if (!within(s.packing, 0, PACKINGS - 1) || s.panels <= 0 || !s.weights || (uintptr_t)s.weights % 64) return false;
        if (m->inputs % LAYOUTS[s.packing].inputs) return false;
        panels += s.panels;
    }
    for (int i = 0; m->order && i < m->inputs; i++)
        if (!within(m->order[i], 0, m->inputs - 1)) return false;
    return panels == m->panels;
}

// Keys or queries of places, which have as many panels for each head
static inline bool is_sound(const Matrix* of_places, const Operation& o) {
    if (!of_places) return true;
    if (!is_sound(of_places) || of_places->format != FLOAT32 || of_places->inputs != o.size || of_places->panels % o.heads) return false;
    const int64_t most = (int64_t)of_places->panels / o.heads * PANEL - 1;
    for (int i = 0; i < o.distance_count; i++)
        if (!within(o.places[i], i ? o.places[i - 1] : 0, most)) return false;
    return true;
}

constexpr int MOST = 1 << 24;  // so that no product of two overflows

static inline bool is_of_experts(const Operation& o) { return o.kind == ROUTE || o.kind == EXPERTS; }

// Of experts, and of sums by weights
static inline bool is_routed(const Operation& o, const Model& m, int64_t from, int64_t to) {
    const int64_t asked = o.heads, written = asked * o.size;
    if ((o.kind == MIX ? o.wanted : o.wanted & ~2) || asked < 1 || asked * m.most_rows > MOST) return false;
    if (o.kind == MIX) return within(o.size, 1, to) && written <= from && within(o.table, 0, m.buffer_count - 1) && asked <= m.buffers[o.table].width;
    if (o.kv_heads < asked) return false;
    if (o.kind == ROUTE && o.column > 1) {  // there are as many experts in the groups that are chosen
        const int64_t each = o.kv_heads / o.column;
        if (o.kv_heads % o.column || !within(o.place, 1, o.column) || !within(o.ahead, 1, each) || asked > o.place * each) return false;
    }
    if (o.kind == ROUTE) return o.kv_heads <= from && asked <= to;
    if (!is_sound(o.matrix) || o.matrix->panels % o.kv_heads || asked * o.matrix->inputs > MOST) return false;
    const int64_t panels = o.matrix->panels / o.kv_heads, inputs = o.matrix->inputs, halves = o.ending == GATED || o.ending == GATED_BY ? 2 : 1;
    if (panels % halves || !within(o.size, 1, panels / halves * PANEL) || written > to) return false;
    return within(o.distance_count, 0, from) && inputs + (asked - 1) * o.distance_count <= from && (o.norm == NO_NORM || (o.gain && inputs % 16 == 0));
}

static inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t state_numbers(const Operation& o) {  // of `is_recurrent` ones, whose heads * size is at most MOST
    return (int64_t)o.heads * panels_of(o.size) * PANEL * o.distance_count;
}

static inline bool is_adapted(const Operation& o, int64_t from, int64_t to) {
    if (!is_sound(o.matrix) || o.wanted || o.from == o.to || o.ending != STORE || o.heads != 1) return false;
    if (!within(o.kv_heads, 1, MOST) || o.matrix->panels % o.kv_heads) return false;
    const int64_t panels = o.matrix->panels / o.kv_heads, inputs = o.matrix->inputs;
    if (!within(o.size, 1, least_of(panels * PANEL, to)) || inputs > from) return false;
    if (!o.places) return o.distance_count == 0 && (o.norm == NO_NORM || (o.gain && inputs % 16 == 0));
    if (o.distance_count != panels || o.norm != NO_NORM || o.matrix->format != FLOAT32) return false;  // nobody prepares these rows
    for (int64_t p = 0; p < panels; p++)
        if (!within(o.places[p], 0, from - inputs)) return false;
    return true;
}

// Of recurrences, whose states `stated` checks, and of gates
static inline bool is_recurrent(const Operation& o, const Model& m, int64_t from, int64_t to) {
    if (o.wanted || !within(o.table, 0, m.buffer_count - 1) || !within(o.heads, 1, MOST) || !within(o.size, 1, MOST)) return false;
    const int64_t values = (int64_t)o.heads * o.size, left = m.buffers[o.table].width;
    if (values > to || !within(o.column, 0, from) || values > from - o.column || !within(o.ahead, 0, left)) return false;
    if (o.kind == GATE) {
        if (o.distance_count != 1 && o.distance_count != o.size) return false;
        return (int64_t)o.heads * o.distance_count <= left - o.ahead && (o.norm == NO_NORM || o.gain);
    }
    if (!within(o.kv_heads, 1, o.heads) || o.heads % o.kv_heads || !within(o.distance_count, 1, MOST)) return false;
    if ((int64_t)o.heads * panels_of(o.size) * m.most_rows > INT32_MAX) return false;
    return m.pages && o.to != o.from && o.to != o.table && o.gain && o.shift && 2 * (int64_t)o.heads <= left - o.ahead &&
           2 * (int64_t)o.kv_heads * o.distance_count <= from - o.column - values;
}

static inline bool is_sound(const Operation& o, const Model& m) {
    if (!within(o.from, 0, m.buffer_count - 1) || !within(o.to, 0, m.buffer_count - 1)) return false;
    const int64_t from = m.buffers[o.from].width, to = m.buffers[o.to].width;
    const int64_t heads = (int64_t)o.heads * o.size, value = o.value_size ? o.value_size : o.size;
    const auto normed = [&](int64_t width) { return o.gain && width % 16 == 0; };
    const auto stated = [&](int64_t numbers) { return within(o.place, 0, m.state) && numbers <= m.state - o.place; };
    if (o.kind == NORM || o.kind == NORM_ADD) return normed(from) && from <= to;
    if (o.kind == CONVOLVE) {
        const int64_t width = o.size ? o.size : from;
        return within(o.column, 0, from) && within(width, 1, least_of(from - o.column, to)) && normed(width) && o.from != o.to &&
               o.shift && o.distance_count >= 1 && within(o.window, 0, o.distance_count - 1) &&
               (!m.kept || (o.window <= m.kept && stated(o.window * width)));
    }
    if (o.kind == RECUR || o.kind == GATE) return is_recurrent(o, m, from, to) && (o.kind == GATE || stated(state_numbers(o)));
    if (o.kind == KEEP)
        return within(o.column, 0, from) && within(o.size, 1, from - o.column) && within(o.window, 1, m.kept) &&
               stated((int64_t)o.window * o.size);
    if (o.kind == RECALL) return !m.kept && within(o.size, 1, to) && stated(o.size);
    if (o.kind == LSTM) return !m.kept && within(o.size, 1, to) && 4 * (int64_t)o.size <= from && stated(2 * (int64_t)o.size);
    if (o.kind == LINEAR) {
        if (!is_sound(o.matrix) || o.matrix->inputs > from || (o.norm != NO_NORM && !normed(o.matrix->inputs))) return false;
        return !o.delta || (!o.wanted && within(o.table, 0, m.buffer_count - 1) && (int64_t)o.matrix->panels * PANEL <= m.buffers[o.table].width);
    }
    if (o.kind == ADAPT) return is_adapted(o, from, to);
    if (is_of_experts(o) || o.kind == MIX) return is_routed(o, m, from, to);
    if (o.kind == COPY) {
        const auto inside = [&](int64_t first, int64_t apart, int64_t width) {
            return first >= 0 && apart >= 0 && first + (o.heads - 1) * apart + o.size <= width;
        };
        return !(o.wanted & ~2) && o.heads >= 1 && o.size >= 1 && inside(o.column, o.window, from) && inside(o.place, o.ahead, to);
    }
    if (o.kind == LOOKUP)
        return is_sound(o.matrix) && !o.matrix->order && o.matrix->inputs <= to && (!o.shift || o.distance_count >= m.positions) &&
               (!o.gain || o.heads >= 1);
    if (o.heads < 1 || o.kv_heads < (o.kind != TURN) || o.size < 1 || (o.kv_heads && o.heads % o.kv_heads)) return false;
    if (heads > from || !within(o.value_size, 0, o.kind == TURN || o.kind == ATTEND ? MOST : 0)) return false;
    const int64_t kv = o.kv_heads * (o.size + value);
    if ((o.distances || o.places) && o.distance_count < 1) return false;
    if (o.kind == ATTEND_ALL)
        return o.kv_heads == o.heads && 3 * heads <= from && heads <= to && within(o.window, 0, 1 << 24) && within(o.ahead, 0, 1 << 24) &&
               (!m.kept || (stated(m.kept * 2 * heads) && !o.place_queries)) &&
               ((!o.distances && !o.places) || o.distance_count % 2) &&
               (!o.places || (is_sound(o.place_keys, o) && is_sound(o.place_queries, o)));
    if (o.kind == TURN) {
        if (kv > from - heads || !within(o.turned, 0, o.size) || !within(o.place, 0, o.size - o.turned)) return false;
        if (o.shift && o.distance_count < m.positions) return false;
        if (o.turned && (!within(o.table, 0, m.turns_count - 1) || o.turned / 2 > m.turns[o.table].half)) return false;
        if (!m.pages || !o.kv_heads) return true;
    }
    if (!within(o.layer, 0, m.layers - 1)) return false;
    if (o.kind == CROSS) return m.cross && o.kv_heads == m.cross_heads && o.size <= m.cross_size && heads <= to;
    if (!m.kv || !m.pages || kv > m.kv[o.layer].width) return false;
    return o.kind == TURN || (o.kind == ATTEND && o.heads * value <= to && o.window >= 0);
}

static inline bool is_sound(const Model& m) {
    for (int number : {m.count, m.buffer_count, m.most_rows, m.positions, m.block, m.pages ? m.page_size : 1})
        if (!within(number, 1, MOST)) return false;
    for (int number : {m.turns_count, m.layers, m.pages, m.slots, m.embeddings, m.kept, m.kept_rows})
        if (!within(number, 0, MOST)) return false;
    if (!within(m.state, 0, 1 << 30)) return false;
    for (int i = 0; m.pages && i < m.layers; i++)  // pages may be copied, whatever the operations are
        if (!m.kv || !within(m.kv[i].width, 0, MOST) || (m.kv[i].width && !m.kv[i].pages)) return false;
    if (!within(m.threads, 1, MOST_THREADS) || !within(m.kv_format, FLOAT32, BFLOAT16)) return false;
    for (int i = 0; i < m.buffer_count; i++)
        if (!within(m.buffers[i].width, 0, MOST)) return false;
    const Operation *last = nullptr, *adapted = nullptr;
    for (int i = 0; i < m.count; i++) {
        const Operation& o = m.operations[i];
        if (!is_sound(o, m)) return false;
        if (o.kind == ADAPT && adapted && o.kv_heads != adapted->kv_heads) return false;
        if (o.kind == ADAPT) adapted = &o;
        if (!is_of_experts(o)) continue;
        if (last && (o.heads != last->heads || o.kv_heads != last->kv_heads)) return false;
        if (o.kind == EXPERTS && o.wanted != (last ? last->wanted : 0)) return false;  // of the rows that chose
        last = &o;
    }
    return true;
}
