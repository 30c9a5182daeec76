// Plans and threads of a step, and the drawing of tokens. What else is computed is in compute.cpp.
#include "sound.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>
#include <thread>
#include <unistd.h>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#ifndef MADE_OF  // by setup.py alone
#define MADE_OF 0
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace {

// Where each array lies in a model's room
struct Room {
    uint8_t* start;
    size_t used = 0;
    template <class T>
    T* take(size_t count) {
        used = (used + 63) / 64 * 64;
        T* at = (T*)(start + used);
        used += count * sizeof(T);
#if defined(__SANITIZE_ADDRESS__)  // finds who reads or writes behind an array, though all are one memory
        if (start) __asan_poison_memory_region(start + used, 64);
        used += 64;
#endif
        return at;
    }
    template <class T>
    T* take_zeroed(size_t count) {
        T* at = take<T>(count);
        if (start) memset((void*)at, 0, count * sizeof(T));
        return at;
    }
};

void lay_out(Engine& e, Room& room) {
    const Model& m = e.model;
    const int table = m.pages ? (m.positions + m.page_size - 1) / m.page_size : 0;
    e.most_spans = (m.positions + SPAN - 1) / SPAN;
    e.width = 0;
    size_t heads = 0, attended = 0, parts = 0, keys = 0, values = 0, scores = 0, asked = 0, experts = 0, adapters = 0, ready = 0;
    const size_t owned = (size_t)m.most_rows + m.kept_rows;
    for (int i = 0; i < m.count; i++) {
        const Operation& o = m.operations[i];
        if ((o.kind == LINEAR || o.kind == EXPERTS || o.kind == ADAPT) && o.matrix->inputs > e.width) e.width = o.matrix->inputs;
        if (is_of_experts(o)) asked = (size_t)m.most_rows * o.heads, experts = o.kv_heads;
        if (o.kind == ADAPT) adapters = o.kv_heads;
        if (o.kind == EXPERTS) ready = std::max(ready, asked * ready_bytes(o.matrix->inputs));
        if (o.kind == ATTEND_ALL) {
            keys = std::max(keys, (size_t)o.heads * panels_of(owned) * o.size * PANEL);
            values = std::max(values, (size_t)o.heads * panels_of(o.size) * owned * PANEL);
            const size_t seen = (size_t)panels_of(m.most_rows + m.kept) * PANEL;
            const size_t quantized = BATCH * quantized_bytes(o.size) + quantized_bytes(seen);
            scores = std::max(scores, BATCH * seen + quantized / 4);
        }
        if (o.kind != ATTEND && o.kind != CROSS) continue;
        const size_t length = 2 + (o.value_size ? o.value_size : o.size), group = o.heads / o.kv_heads;
        heads = std::max(heads, (size_t)o.kv_heads);
        attended = std::max(attended, BLOCK * (2 * group + 1) * length);
        parts = std::max(parts, (size_t)BLOCK * o.heads * e.most_spans * length);
    }
    e.phases = room.take_zeroed<Phase>(phase_count(m));
    e.blocks = room.take<Block>(m.most_rows);
    e.slots = room.take<Block>(m.most_rows);
    for (Chunks* all : {&e.sequences, &e.chunks})
        *all = {room.take<Chunk>(m.most_rows), room.take<Block>(m.most_rows), room.take<int32_t>(owned), 0, 0};
    e.come = room.take_zeroed<int32_t>(BLOCK * heads);
    e.step.positions = room.take<int32_t>(m.most_rows);
    e.step.wanted = room.take<int32_t>(m.most_rows);
    e.step.tables = room.take<int32_t>((size_t)m.most_rows * table);
    e.tokens = room.take<int32_t>(m.most_rows);
    e.types = room.take<int32_t>(m.most_rows);
    e.seen = room.take<int32_t>(m.most_rows);
    const auto groups = [&room](size_t most, size_t kinds) {
        int32_t *all = room.take<int32_t>(most), *order = room.take_zeroed<int32_t>(most), *starts = room.take<int32_t>(kinds);
        return Groups{all, order, starts, room.take<Block>(kinds), 0, 0};
    };
    e.experts = groups(asked, experts);
    e.adapted = groups(adapters ? m.most_rows : 0, adapters);
    e.ready = room.take<uint8_t>(std::max(ready, m.most_rows * ready_bytes(e.width)));
    e.parts = room.take<float>(parts);
    const size_t narrowed = e.width + OWN_NARROWED * std::max(2 * quantized_bytes(e.width), pairs_bytes(e.width)) / 4 + 16;
    e.keys = room.take<float>(keys);
    e.values = room.take<float>(values);
    // a chance and an id of each token
    const size_t drawn = m.chooses ? 3 * (size_t)m.buffers[m.buffer_count - 1].width : 0;
    const size_t chances = 3 * experts * sizeof(Chance) / sizeof(float);  // of them, of groups, and of one of these
    const size_t own = std::max({(size_t)OWN_ROWS * e.width, narrowed, attended, scores, drawn, chances});
    for (int t = 0; t < m.threads; t++) e.own[t] = room.take<float>(own);
}

struct Native {
    Engine engine;
    Code code;
    alignas(64) uint32_t round = 0;
    bool over = false;
    const pid_t process = getpid();
    std::vector<std::thread> threads;

    void work(int thread, uint32_t now) {
        for (int p = 0; p < phase_count(engine.model); p++) {
            if (__atomic_load_n(&engine.phases[p].total, __ATOMIC_RELAXED)) code.run(engine, p, thread, now);
            await(engine.phases[p], now);
        }
    }

    void serve(int thread) {
        for (uint32_t before = 0;;) {
            uint32_t now;
            for (int turn = 0; (now = __atomic_load_n(&round, __ATOMIC_SEQ_CST)) == before; turn++)
                if (turn < SPIN) relax();
                else futex(&round, FUTEX_WAIT_PRIVATE, before);
            before = now;
            if (__atomic_load_n(&over, __ATOMIC_SEQ_CST)) return;
            work(thread, now);
        }
    }

    void run() {
        const uint32_t now = round + 1;
        for (int p = 0; p < phase_count(engine.model); p++)
            prepare(engine.phases[p], code.share_of(engine, p), engine.model.threads, now);
        __atomic_store_n(&round, now, __ATOMIC_SEQ_CST);
        futex(&round, FUTEX_WAKE_PRIVATE, INT_MAX);
        work(0, now);
    }

    ~Native() {
        __atomic_store_n(&over, true, __ATOMIC_SEQ_CST);
        const uint32_t now = round + 1;
        for (int p = 0; p < phase_count(engine.model); p++) prepare(engine.phases[p], {0, 1}, engine.model.threads, now);
        __atomic_store_n(&round, now, __ATOMIC_SEQ_CST);
        futex(&round, FUTEX_WAKE_PRIVATE, INT_MAX);
        for (auto& each : threads) each.join();
    }
};

// Whether a draw stays within its step's arrays and the tokens
bool is_sound(const Draw& d, const Step& plan, int tokens) {
    const auto inside = [](int64_t first, int64_t count, int64_t all) { return within(first, 0, all) && within(count, 0, all - first); };
    if (!within(d.choice, NOTHING, BEAM) || !within(d.timestamps, 0, tokens) || !within(d.asked, 0, d.found_count)) return false;
    if (!inside(d.edits, d.edit_count, plan.edit_count) || !inside(d.bans, d.ban_count, plan.ban_count)) return false;
    if (!inside(d.found, d.found_count, plan.found_count)) return false;
    if (d.allowed != -1 && !inside(d.allowed, (tokens + 7) / 8, plan.allowed_size)) return false;
    for (const Edit* one = plan.edits + d.edits; one < plan.edits + d.edits + d.edit_count; one++)
        if (!within(one->token, 0, tokens - 1) || !within(one->change, ADDED, REPLACED)) return false;
    for (const int32_t* ban = plan.bans + 2 * d.bans; ban < plan.bans + 2 * (d.bans + d.ban_count); ban += 2)
        if (!within(ban[0], 0, ban[1]) || ban[1] > tokens) return false;
    for (int i = 0; i < d.asked; i++)
        if (!within(plan.found[d.found + i].token, 0, tokens - 1)) return false;
    return true;
}

// Copies the plan, if it is one; nothing is read or written by its numbers before. What its draws read is not copied.
Fault admit(Engine& e, const Step& plan) {
    const Model& m = e.model;
    Step& s = e.step;
    if (plan.part < WHOLE || plan.part > HEAD || (plan.draws && !m.chooses)) return BAD_PART;
    if (plan.part == HEAD) {
        const Operation& head = m.operations[m.count - 1];
        if (head.kind != LINEAR || head.wanted != 2) return BAD_PART;  // another one reads what this plan does not say
        if (plan.wanted_count < 1 || plan.wanted_count > m.most_rows) return BAD_WANTED;
        s.rows = s.wanted_count = plan.wanted_count;
        s.part = HEAD;
        s.draws = nullptr;
        s.copy_count = 0;
        e.adapted.count = e.adapted.rows = 0;
        return FINE;
    }
    if (plan.rows < 1 || plan.rows > m.most_rows || plan.chunk_count < 1 || plan.chunk_count > plan.rows) return BAD_ROWS;
    if (plan.wanted_count < 0 || plan.wanted_count > plan.rows) return BAD_WANTED;
    if (plan.cosines ? m.turns_count != 1 || !plan.sines : plan.sines != nullptr) return BAD_TABLE;
    const int64_t most_table = m.pages ? (int64_t)m.most_rows * ((m.positions + m.page_size - 1) / m.page_size) : 0;
    if (plan.table_size < (m.pages > 0) || plan.table_size > most_table) return BAD_TABLE;
    for (int i = 0; i < plan.table_size; i++)
        if (plan.tables[i] < 0 || plan.tables[i] >= m.pages) return BAD_PAGE;
    for (int i = 0; i < plan.wanted_count; i++)
        if (plan.wanted[i] < 0 || plan.wanted[i] >= plan.rows) return BAD_WANTED;
    for (int row = 0; row < plan.rows; row++) {
        if (plan.positions[row] < 0 || plan.positions[row] >= m.positions) return BAD_POSITION;
        for (int t = 0; t < m.turns_count; t++)
            if (plan.positions[row] >= m.turns[t].count) return BAD_POSITION;
    }
    for (int i = 0; i < m.count; i++) {
        const Operation& o = m.operations[i];
        for (int row = 0; o.kind == LOOKUP && plan.tokens && row < plan.rows; row++) {
            if (!within(plan.tokens[row], 0, o.matrix->outputs - 1)) return BAD_TOKEN;
            if (plan.types && o.gain && !within(plan.types[row], 0, o.heads - 1)) return BAD_TOKEN;
        }
    }
    const Operation* end = m.operations + m.count;
    const Operation* adapt = std::find_if(m.operations, end, [](const Operation& o) { return o.kind == ADAPT; });
    for (int row = 0; plan.adapters && row < plan.rows; row++)
        if (!within(plan.adapters[row], -1, adapt == end ? -1 : adapt->kv_heads - 1)) return BAD_SLOT;
    if (!within(plan.copy_count, 0, m.pages)) return BAD_PAGE;
    for (int i = 0; i < 2 * plan.copy_count; i++)
        if (!within(plan.copies[i], 0, m.pages - 1)) return BAD_PAGE;
    for (int count : {plan.edit_count, plan.ban_count, plan.found_count, plan.allowed_size})
        if (plan.draws && !within(count, 0, INT32_MAX / 2)) return BAD_DRAW;
    for (int i = 0; plan.draws && i < plan.wanted_count; i++)
        if (!is_sound(plan.draws[i], plan, m.buffers[m.buffer_count - 1].width)) return BAD_DRAW;
    e.block_count = e.slot_count = e.owned = 0;
    for (Chunks* all : {&e.sequences, &e.chunks}) all->count = all->batch_count = 0;
    const auto add = [&m](Chunks& all, const Chunk& one) {
        // rows of two blocks see different rows; where a state is, a batch that began elsewhere had other sums
        for (int i = 0, most; i < one.rows; i += most) {
            most = std::min({BATCH, one.rows - i, m.block > 1 || (m.kept && !m.pages) ? m.block - i % m.block : BATCH});
            all.batches[all.batch_count++] = {one.row + i, most, all.count, 0};
        }
        std::fill_n(all.owners + one.start, one.kept + one.rows, all.count);
        all.of[all.count++] = one;
    };
    int row = 0, begun = 0, saves = 0;  // ``begun``: where the sequence begins
    for (int c = 0; c < plan.chunk_count; c++) {
        const int32_t* chunk = plan.chunks + 4 * c;
        const int count = chunk[0], table = chunk[1], slot = chunk[2], length = chunk[3];
        if (count < 1 || count > plan.rows - row) return BAD_ROWS;
        const int last = plan.positions[row + count - 1];
        if (!m.pages && !within(table, 0, c > 0 && !m.state)) return BAD_TABLE;
        if (m.pages && (table < 0 || table > plan.table_size || last / m.page_size >= plan.table_size - table)) return BAD_TABLE;
        for (int i = 1; i < count; i++)
            if (m.pages && plan.positions[row + i] != plan.positions[row] + i) return BAD_POSITION;
        for (int i = 0; plan.seen && i < count; i++) {
            const int least = std::max(plan.positions[row + i], i ? plan.seen[row + i - 1] : 0);
            if (!within(plan.seen[row + i], least, last)) return BAD_POSITION;
        }
        if (m.cross && (slot < 0 || slot >= m.slots || length < 1 || length > m.embeddings)) return BAD_SLOT;
        for (int i = 0; i < count; i += BLOCK)
            e.blocks[e.block_count++] = {row + i, std::min(BLOCK, count - i), table, 0};
        float* state = m.state && plan.states ? plan.states[c] : nullptr;
        const int kept = m.state ? length : 0;
        if (m.state && m.pages && !state) return BAD_SLOT;
        for (int other = 0; state && m.pages && other < c; other++)
            if (plan.states[other] == state) return BAD_SLOT;  // two chunks would change it at once
        if (m.state && (!within(kept, 0, std::min(m.kept, m.kept_rows - (e.owned - row))) || (!state && (kept || !m.kept)))) return BAD_SLOT;
        const int first_save = saves;
        for (; saves < plan.save_count && plan.saved_rows[saves] < row + count; saves++)
            if (!m.state || !m.pages || !plan.saved[saves] || plan.saved_rows[saves] < (saves > first_save ? plan.saved_rows[saves - 1] : row))
                return BAD_SLOT;
        const Chunk own{row, count, kept, e.owned, state, nullptr, first_save, saves - first_save};
        const bool begins = m.pages || !table, ends = m.pages || c + 1 == plan.chunk_count || !chunk[5];
        if (begins) begun = row;
        add(e.chunks, own);
        if (ends) add(e.sequences, begins ? own : Chunk{begun, row + count - begun, 0, begun, nullptr, nullptr, 0, 0});
        e.owned += kept + count;
        for (int i = 0; i < count; i++) {  // neighbours of one slot read it together
            Block* last = e.slot_count ? &e.slots[e.slot_count - 1] : nullptr;
            if (last && last->rows < BLOCK && last->table == slot && last->length == length) last->rows++;
            else e.slots[e.slot_count++] = {row + i, 1, slot, length};
        }
        row += count;
    }
    if (row != plan.rows) return BAD_ROWS;
    if (saves != plan.save_count) return BAD_SLOT;
    for (int i = 0; i < plan.save_count; i++) {  // two threads would write it at once
        for (int other = 0; other < i; other++)
            if (plan.saved[other] == plan.saved[i]) return BAD_SLOT;
        for (int c = 0; c < plan.chunk_count; c++)
            if (plan.states[c] == plan.saved[i]) return BAD_SLOT;
    }
    for (int i = 0; i < m.count; i++) {  // two rows would change a state at once
        const Operation& o = m.operations[i];
        for (int at = 0; o.kind == LSTM && at < (o.wanted ? plan.wanted_count : plan.rows); at++) {
            Chunk& c = e.sequences.of[e.sequences.owners[o.wanted == 1 ? plan.wanted[at] : at]];
            if (c.changed == &o) return BAD_ROWS;
            c.changed = &o;
        }
    }
    s.rows = plan.rows;
    s.wanted_count = plan.wanted_count;
    s.part = plan.part;
    memcpy((void*)s.positions, plan.positions, plan.rows * 4);
    if (plan.table_size) memcpy((void*)s.tables, plan.tables, plan.table_size * 4);
    s.tokens = plan.tokens ? e.tokens : nullptr;
    if (plan.tokens) memcpy(e.tokens, plan.tokens, plan.rows * 4);
    e.adapted.count = e.adapted.rows = 0;
    if (plan.adapters && adapt != end) memcpy(e.adapted.asked, plan.adapters, plan.rows * 4), group(e.adapted, plan.rows, adapt->kv_heads);
    s.types = plan.types ? e.types : nullptr;
    if (plan.types) memcpy(e.types, plan.types, plan.rows * 4);
    s.cosines = plan.cosines;
    s.sines = plan.sines;
    s.seen = plan.seen ? e.seen : s.positions;
    if (plan.seen) memcpy(e.seen, plan.seen, plan.rows * 4);
    s.in_windows = plan.in_windows;
    s.fed = plan.fed;
    s.draws = plan.draws;
    s.edits = plan.edits;
    s.bans = plan.bans;
    s.found = plan.found;
    s.allowed = plan.allowed;
    s.saved = plan.saved;
    s.saved_rows = plan.saved_rows;
    s.copies = plan.copies;
    s.copy_count = plan.copy_count;
    if (plan.wanted_count) memcpy((void*)s.wanted, plan.wanted, plan.wanted_count * 4);
    e.split = plan.rows <= BLOCK;
    return FINE;
}

#if defined(__x86_64__)
// Whether there is AVX-VNNI; or, for a test on another processor, the same in the encoding of AVX-512
bool multiplies_bytes() {
#if defined(EVEX)
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);
#endif
}
#endif

}  // namespace

constexpr int STEEP = 1024;  // tokens that usually hold all of top-p

// A token, as `sample` in models/sampling/logits.py draws it: by inverse CDF at the draw's point, in float64. `chances`
// and `ids` [count] are room.
int draw(const float* logits, int count, float largest, const Draw& d, double* chances, int32_t* ids) {
    float least = -INFINITY;
    if (d.top_k > 0 && d.top_k < count) {
        float* sorted = (float*)chances;
        std::copy(logits, logits + count, sorted);
        std::nth_element(sorted, sorted + d.top_k - 1, sorted + count, [](float a, float b) { return a > b; });
        least = sorted[d.top_k - 1];
    }
    double total = 0.0, top = 0.0;
    for (int i = 0; i < count; i++) {
        chances[i] = logits[i] < least ? 0.0 : std::exp(((double)logits[i] - largest) / d.temperature);
        total += chances[i];
    }
    for (int i = 0; i < count; i++) top = std::max(top, chances[i] /= total);
    std::iota(ids, ids + count, 0);
    int kept = count;
    if (d.top_p < 1.0) {  // the likeliest, falling, up to the one that makes their sum reach top-p
        const auto before = [&](int a, int b) { return chances[a] != chances[b] ? chances[a] > chances[b] : a < b; };
        int sorted = std::min(STEEP, count);
        std::partial_sort(ids, ids + sorted, ids + count, before);
        double sum = 0.0;
        for (int i = 0; i < sorted; i++) sum += chances[ids[i]];
        if (sum < d.top_p) std::sort(ids + sorted, ids + count, before);
        if (sum < d.top_p) sorted = count;
        sum = chances[ids[0]];  // one is kept, whatever top-p is
        for (kept = 1; kept < sorted && sum < d.top_p; kept++) sum += chances[ids[kept]];
    }
    double sum = 0.0, so_far = 0.0;
    const auto chance = [&](int i) { return chances[ids[i]] < d.min_p * top ? 0.0 : chances[ids[i]]; };
    for (int i = 0; i < kept; i++) sum += chance(i);
    for (int i = 0; i < kept; i++)
        if ((so_far += chance(i)) > sum * d.point) return ids[i];
    return ids[kept - 1];
}

// The experts of a row, as torch chooses them by softmax or sigmoid and topk, equal ones in its order, too. `all` [kv_heads] is room.
void route(const float* logits, const Operation& o, float* weights, int32_t* asked, Chance* all) {
    const int count = o.kv_heads, chosen = o.heads;
    const float largest = *std::max_element(logits, logits + count);
    double sum = 0.0;
    for (int i = 0; i < count; i++) sum += std::exp((double)logits[i] - largest);
    const auto chance = [&](int i) {
        return (float)(o.activation == SIGMOID ? 1.0 / (1.0 + std::exp(-(double)logits[i])) : std::exp((double)logits[i] - largest) / sum);
    };
    for (int i = 0; i < count; i++) all[i] = {chance(i) + (o.gain ? o.gain[i] : 0.0f), i};
    const auto before = [](const Chance& a, const Chance& b) {  // NaN is the largest
        return (std::isnan(a.value) && !std::isnan(b.value)) || a.value > b.value;
    };
    const auto choose = [&](Chance* of, int some, int of_all) {
        if (some * 64 <= of_all) return std::partial_sort(of, of + some, of + of_all, before);
        std::nth_element(of, of + some - 1, of + of_all, before);
        std::sort(of, of + some - 1, before);
    };
    const int each = o.column > 1 ? count / o.column : count;
    Chance* groups = all + count;
    for (int g = 0; g < count / each && each < count; g++) {
        groups[g] = {0.0f, g};
        std::copy_n(all + g * each, each, groups + o.column);
        std::partial_sort(groups + o.column, groups + o.column + o.ahead, groups + o.column + each, before);
        for (int i = 0; i < o.ahead; i++) groups[g].value += groups[o.column + i].value;
    }
    if (each < count) choose(groups, o.place, o.column);
    for (int g = o.place; g < o.column && each < count; g++)
        for (int i = 0; i < each; i++) all[groups[g].expert * each + i].value = -INFINITY;
    choose(all, chosen, count);
    float together = 0.0f;
    for (int i = 0; i < chosen; i++) {
        asked[i] = (int32_t)all[i].expert;
        together += weights[i] = chance(asked[i]);
    }
    for (int i = 0; o.together && i < chosen; i++) weights[i] /= std::max(together, o.epsilon) + o.cap;
    for (int i = 0; o.delta && i < chosen; i++) weights[i] = (float)asked[i];
}

void group(Groups& g, int count, int kinds) {
    std::fill_n(g.starts, kinds, 0);
    for (int i = 0; i < count; i++)
        if (g.asked[i] >= 0) g.starts[g.asked[i]]++;
    g.count = g.rows = 0;
    for (int i = 0; i < kinds; i++) {
        const int rows = g.starts[i];
        if (rows) g.parts[g.count++] = {g.rows, rows, i, 0};
        g.starts[i] = g.rows;
        g.rows += rows;
    }
    for (int i = 0; i < count; i++)
        if (g.asked[i] >= 0) g.order[g.starts[g.asked[i]]++] = i;
}

// The strength and the decay of each head of a row, in place
void temper(const Operation& o, float* numbers) {
    const auto softplus = [](double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); };
    for (int h = 0; h < o.heads; h++) {
        float &strength = numbers[h], &decay = numbers[o.heads + h];
        if (o.delta) {
            strength = (float)(o.cap / (1.0 + std::exp(-(double)strength)));
            decay = (float)std::exp(o.gain[h] * softplus((double)decay + o.shift[h]));
            continue;
        }
        const double step = softplus((double)strength * o.soft_cap + o.shift[h]);
        strength = std::min(std::max((float)step, o.epsilon), o.cap);
        decay = (float)std::exp((double)o.gain[h] * strength);
    }
}

extern "C" {

size_t triolet_room(const Model* model) {
    if (!is_sound(*model)) return 0;
    Engine engine{};
    engine.model = *model;
    Room room{nullptr};
    lay_out(engine, room);
    return room.used;
}

uint32_t triolet_made_of() { return MADE_OF; }

int32_t triolet_level() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        return __builtin_cpu_supports("avx512bf16") ? 5 : 4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 3;
#endif
    return 1;
}

void* triolet_open(const Model* model, int32_t level) {
    if (!is_sound(*model) || !model->room || (uintptr_t)model->room % 64) return nullptr;
    Native* native = new (std::nothrow) Native{};
    if (!native) return nullptr;
    native->engine.model = *model;
    Room room{model->room};
    lay_out(native->engine, room);
    const int best = triolet_level();
    const int chosen = level && level < best ? level : best;
#if defined(__x86_64__)
    switch (chosen) {
        case 5: native->code = level5::code(); break;
        case 4: native->code = level4::code(); break;
        case 3: native->code = multiplies_bytes() ? level3_vnni::code() : level3::code(); break;
        default: native->code = level1::code();
    }
#else
    native->code = level1::code();
#endif
    try {
        for (int t = 1; t < model->threads; t++) native->threads.emplace_back([native, t] { native->serve(t); });
    } catch (const std::exception&) {  // the system gives no more threads: those that are there end
        delete native;
        return nullptr;
    }
    return native;
}

void triolet_close(void* handle) {
    Native* native = (Native*)handle;
    if (native->process == getpid()) delete native;  // a fork has no threads to join, and leaves it to its end
}

int32_t triolet_step(void* handle, const Step* plan) {
    Native& native = *(Native*)handle;
    const Fault fault = admit(native.engine, *plan);
    if (fault == FINE) native.run();
    return fault;
}

}  // extern "C"
