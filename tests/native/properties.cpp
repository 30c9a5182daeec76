// The promises of the native library, on models and steps that are drawn from a seed: a row's bits are the same alone
// and in any batch, chunk, page and number of threads, and so is its token; its numbers are those of plain code; a plan
// or a model that is none is refused. `check.py` builds this under sanitizers, which find what touches other memory,
// and for arm64.
//
//     properties SEED ROUNDS PLANS    PLANS: how many broken plans and models of each round
#include "plain.h"

#include <cstdio>

namespace {

constexpr int32_t UNKNOWN = -7;  // before a token is chosen

using Bits = std::vector<std::vector<float>>;  // of each sequence: logits of all its positions

void check(bool right, const char* promise, uint32_t seed) {
    if (right) return;
    printf("broken: %s. The same again: properties %u 1 ...\n", promise, seed);
    exit(1);
}

struct Plan {
    std::vector<int32_t> positions, chunks, tables, wanted, tokens, types, adapters, seen;
    std::vector<Draw> draws;
    std::vector<Edit> edits;
    std::vector<Found> found;
    std::vector<int32_t> bans, copies;
    std::vector<uint8_t> allowed;
    std::vector<float*> states, saved;
    std::vector<int32_t> saved_rows;
    std::vector<float> angles;
    void add(const Wish& wish) {
        Draw draw = wish.draw;
        draw.edits = (int)edits.size(), draw.bans = (int)bans.size() / 2, draw.found = (int)found.size();
        draw.edit_count = (int)wish.edits.size(), draw.ban_count = (int)wish.bans.size() / 2;
        draw.found_count = (int)wish.found.size(), draw.allowed = wish.allowed.empty() ? -1 : (int)allowed.size();
        draw.token = UNKNOWN;
        draws.push_back(draw);
        edits.insert(edits.end(), wish.edits.begin(), wish.edits.end());
        bans.insert(bans.end(), wish.bans.begin(), wish.bans.end());
        found.insert(found.end(), wish.found.begin(), wish.found.end());
        allowed.insert(allowed.end(), wish.allowed.begin(), wish.allowed.end());
    }
    Step step(int part = WHOLE) {
        return {(int)positions.size(), (int)wanted.size(), (int)chunks.size() / 4, (int)tables.size(), part,
                positions.data(), chunks.data(), tables.data(), wanted.data(), tokens.empty() ? nullptr : tokens.data(),
                types.empty() ? nullptr : types.data(), adapters.empty() ? nullptr : adapters.data(),
                draws.empty() ? nullptr : draws.data(), edits.data(), bans.data(), found.data(), allowed.data(),
                nullptr, nullptr, seen.empty() ? nullptr : seen.data(), states.data(), copies.data(), saved.data(), saved_rows.data(), (int)edits.size(), (int)bans.size() / 2, (int)found.size(), (int)allowed.size(),
                (int)copies.size() / 2, (int)saved.size()};
    }
};

struct Opened {
    const Made& made;
    Arena arena;
    std::vector<Buffer> buffers;
    std::vector<Operation> operations;
    Model model{};
    Layer layers[LAYERS]{};  // of one memory
    uint8_t* pages = nullptr;
    size_t room = 0, kept;  // bytes
    void* handle = nullptr;

    Opened(const Made& made, int most_rows, int page_size, int pages) : made(made), operations(made.operations) {
        for (int width : made.widths) buffers.push_back({arena.take<float>((size_t)most_rows * width), width});
        if (!made.paged) pages = page_size = 0;
        const int width = made.kv_heads * (made.size + (made.value_size ? made.value_size : made.size));
        const size_t of_layer = (size_t)pages * page_size * width * made.kv_bytes();
        kept = LAYERS * of_layer;
        if (made.paged) this->pages = arena.take<uint8_t>(kept);
        for (int i = 0; made.paged && i < LAYERS; i++) layers[i] = {this->pages + i * of_layer, width};
        const int count = (int)operations.size();
        model = {operations.data(), buffers.data(), &made.turns, count, (int)buffers.size(), 1, 1, 1, most_rows,
                 POSITIONS + 9, made.kv_format, made.paged ? layers : nullptr, LAYERS, pages, page_size, made.cross, SLOTS, made.cross_heads, made.embeddings,
                 made.cross_size, made.state, made.kept, 16 * made.kept, made.block, nullptr};
    }
    bool open(int threads, int level) {
        model.threads = threads;
        if (!(room = triolet_room(&model))) return false;
        model.room = arena.take<uint8_t>(room);
        return (handle = triolet_open(&model, level));
    }
    ~Opened() { if (handle) triolet_close(handle); }
};

long steps = 0;

struct Saved { int sequence, position; std::vector<float> state; };

// Feeds all sequences, some of their next rows in each step, in chunks and pages of the draw's. Where rows attend to
// all of their sequence, a chunk is a whole one.
Bits all_of(const Made& made, std::vector<Sequence>& all, int threads, int level, Random& draw, uint32_t seed) {
    const int page_size = draw.of({1, 9, 16, 64}), fewer = draw.of({1, 7, 40, 100, 300});
    const int most_rows = made.stated ? std::max(fewer, made.block) : made.joined ? POSITIONS + draw.upto(0, 150) : fewer;
    std::vector<std::vector<int>> pages;
    std::vector<int> at(all.size()), free_pages;
    int needed = 0;
    for (const Sequence& one : all) needed += (one.length + page_size - 1) / page_size;
    for (int page = 0; page < needed + 3; page++) free_pages.push_back(page);
    std::shuffle(free_pages.begin(), free_pages.end(), draw.bits);
    for (const Sequence& one : all) {
        pages.emplace_back(free_pages.end() - (one.length + page_size - 1) / page_size, free_pages.end());
        free_pages.resize(free_pages.size() - pages.back().size());
    }
    Opened opened(made, most_rows, page_size, needed + 3);
    check(opened.open(threads, level), "a model opens", seed);
    const int width = made.widths[0], vocabulary = made.widths.back(), count = (int)made.widths.size();
    Bits found(all.size()), states(all.size(), std::vector<float>(made.state));
    for (size_t i = 0; i < all.size(); i++) found[i].resize((size_t)all[i].length * vocabulary);
    for (bool left = true; left; steps++) {
        Plan plan;
        std::vector<float> inputs;
        std::vector<float*> places;
        std::vector<Wish*> wishes;
        std::vector<Saved> savings, ends;
        const bool looked_up = made.words && draw.one_in(2), drawn = !draw.one_in(4);
        left = false;
        for (size_t i = 0; i < all.size(); i++) {
            left = left || at[i] < all[i].length;
            const int room = std::min(all[i].length - at[i], most_rows - (int)plan.positions.size());
            if (room <= 0 || draw.one_in(3) || (made.joined && !made.stated && room < all[i].length)) continue;
            int rows = made.joined && !made.stated ? room : draw.one_in(3) ? 1 : draw.upto(1, room);
            if (made.stated && at[i] + rows < all[i].length) rows = rows / made.block * made.block;
            if (made.recurrent) rows = 1;
            if (!rows) continue;
            const int length = made.carried ? made.kept : made.state ? std::min(at[i], made.kept) : all[i].embeddings;
            const int part = made.joined && !made.stated ? made.part : rows;
            for (int cut = 0; cut < rows; cut += part) {
                const int second = made.paged ? (int)plan.tables.size() : cut > 0;
                plan.chunks.insert(plan.chunks.end(), {std::min(part, rows - cut), second, all[i].slot, length});
            }
            plan.states.push_back(states[i].data());
            for (int row = 0; made.carried && row < rows; row++)
                if (draw.one_in(9)) {
                    plan.saved_rows.push_back((int)plan.positions.size() + row);
                    savings.push_back({(int)i, at[i] + row + 1, std::vector<float>(made.state)});
                }
            if (made.carried) ends.push_back({(int)i, at[i] + rows, {}});
            const auto page = pages[i].begin();
            if (made.paged) plan.tables.insert(plan.tables.end(), page, page + (at[i] + rows - 1) / page_size + 1);
            const auto first = all[i].inputs.begin() + at[i] * width;
            inputs.insert(inputs.end(), first, first + rows * width);
            for (int end = at[i] + rows; at[i] < end; at[i]++) {
                places.push_back(&found[i][(size_t)at[i] * vocabulary]);
                wishes.push_back(&all[i].wishes[at[i]]);
                if (looked_up) plan.tokens.push_back(all[i].tokens[at[i]]);
                if (looked_up && made.typed) plan.types.push_back(all[i].types[at[i]]);
                if (made.adapters) plan.adapters.push_back(all[i].adapter);
                plan.positions.push_back(at[i]);
                plan.wanted.push_back((int)plan.wanted.size());
            }
        }
        if (plan.positions.empty()) continue;
        std::shuffle(plan.wanted.begin(), plan.wanted.end(), draw.bits);
        Arena own;
        std::vector<Buffer>& buffers = opened.buffers;
        buffers[0].data = own.take<float>(inputs.size());
        if (!looked_up) memcpy(buffers[0].data, inputs.data(), inputs.size() * 4);
        for (size_t i = 0; drawn && i < plan.wanted.size(); i++) plan.add(*wishes[plan.wanted[i]]);
        buffers[count - 1].data = own.take<float>(plan.wanted.size() * vocabulary);
        for (Saved& one : savings) plan.saved.push_back(one.state.data());
        const bool apart = draw.one_in(4);
        const Step step = plan.step(apart ? HEADLESS : WHOLE), head = Plan{{}, {}, {}, plan.wanted}.step(HEAD);
        check(triolet_step(opened.handle, &step) == FINE, "a plan is computed", seed);
        for (Saved& one : ends) savings.push_back({one.sequence, one.position, states[one.sequence]});
        for (const Saved& one : savings) {  // a state is the same wherever chunks end
            const auto [known, first] = all[one.sequence].states.emplace(one.position, one.state);
            const bool alike = first || !memcmp(known->second.data(), one.state.data(), one.state.size() * 4);
            check(alike, "a state behind a row is the same, saved or at the end of a chunk", seed);
        }
        const std::vector<float> kept(buffers[count - 1].data, buffers[count - 1].data + plan.wanted.size() * vocabulary);
        if (apart || drawn) check(triolet_step(opened.handle, &head) == FINE, "a head is computed", seed);
        for (size_t i = 0; i < plan.wanted.size(); i++)
            memcpy(places[plan.wanted[i]], buffers[count - 1].data + i * vocabulary, vocabulary * 4);
        for (size_t i = 0; i < plan.draws.size(); i++) {
            const Draw& now = plan.draws[i];
            Wish& wish = *wishes[plan.wanted[i]];
            if (apart) {
                check(now.token == UNKNOWN, "nothing is chosen of what is not there yet", seed);
                continue;
            }
            const float *raw = places[plan.wanted[i]], *own = &kept[i * vocabulary];
            const Found* told = plan.found.data() + now.found;
            check(is_left(wish, raw, own, vocabulary), "plain code changes the logits alike", seed);
            check(is_told(wish, told, raw, own, vocabulary), "plain code finds the same tokens", seed);
            if (now.choice == TOKEN) check(is_chosen(now, own, vocabulary), "plain code may choose the same token", seed);
            const bool first = wish.draw.token == UNKNOWN;
            if (first) wish.draw.token = now.token, wish.draw.logprob = now.logprob, wish.found.assign(told, told + now.found_count);
            const bool same = !memcmp(&wish.draw.token, &now.token, sizeof(int32_t) + sizeof(float));
            check(same, "a row's token is the same", seed);
            const bool alike = wish.found.empty() || !memcmp(wish.found.data(), told, wish.found.size() * sizeof(Found));
            check(alike, "what is told of a row is the same", seed);
        }
    }
    for (const auto& logits : found)
        for (float v : logits) check(std::isfinite(v), "what is computed is of what was written", seed);
    return found;
}

bool same(const Bits& a, const Bits& b) {
    for (size_t i = 0; i < a.size(); i++)
        if (memcmp(a[i].data(), b[i].data(), a[i].size() * 4)) return false;
    return true;
}

void same_bits(uint32_t seed) {
    const Made made(seed, 0);
    Random draw{std::mt19937(seed + 1)};
    std::vector<Sequence> all;
    for (int i = draw.upto(1, 4); i--;) {
        const int length = draw.of({1, 2, 9, 33, 130, i ? 20 : POSITIONS});
        Sequence one{{}, length, draw.upto(0, SLOTS - 1), draw.upto(1, made.embeddings), {}, {}, {}, {}};
        if (made.adapters) one.adapter = draw.upto(-1, made.adapters - 1);
        for (int j = 0; j < length; j++) {
            one.tokens.push_back(made.words ? draw.upto(0, made.words->outputs - 1) : 0);
            const float* word = made.words ? &made.weights.at(made.words)[one.tokens[j] * made.widths[0]] : nullptr;
            one.types.push_back(draw.upto(0, made.types - 1));
            const float* type = made.typed ? made.typed + one.types[j] * made.widths[0] : nullptr;
            for (int k = 0; k < made.widths[0]; k++) {
                float value = word ? word[k] * made.words_scale : draw.value();
                if (type) value += type[k];
                if (made.places) value += made.places[j * made.widths[0] + k];
                one.inputs.push_back(value);
            }
            one.wishes.emplace_back(draw, made.widths.back());
            one.wishes.back().draw.token = UNKNOWN;
        }
        all.push_back(one);
    }
    bool in_int8 = false;
    for (const auto& [matrix, _] : made.weights) in_int8 |= is_int8(matrix->format);
    for (int level : {1, 3, 4, 5}) {
        if (level > triolet_level()) break;
        std::vector<Sequence> again = all;
        const Bits expected = all_of(made, again, 1, level, draw, seed);
        check(same(expected, all_of(made, again, 16, level, draw, seed)), "16 threads compute the bits of one", seed);
        for (size_t i = 0; i < all.size(); i++) {
            std::vector<Sequence> one{again[i]};
            const Bits alone = all_of(made, one, draw.upto(1, 4), level, draw, seed);
            check(same(alone, {expected[i]}), "a row has the same bits alone", seed);
            const double far = off(made, all[i], expected[i]);
            // an input between two numbers of int8 may be either: one step of 127, and what becomes of it (0.11 was seen)
            const double exact = in_int8 ? 0.25 : made.most_format == PAIRS ? 0.05 : 1e-4;
            const double most = made.kv_format == BFLOAT16 ? 0.05 : made.kv_format == FLOAT16 ? 0.01 : 0.0;
            check(far < exact + most, "numbers are those of plain code", seed);
        }
    }
}

// ---------------------------------------------------------------- plans and models that are none

constexpr auto ODD = {0.0, 0.5, 1.0, 1.0, 1e-300, -1.0, 2.0, (double)NAN, (double)INFINITY};  // of draws

int32_t other(Random& draw, int32_t value) {
    const int32_t near = (int32_t)(value + (draw.one_in(2) ? 1u : -1u)), far = (int32_t)draw.bits();
    return draw.of({near, near, -1, 0, INT32_MIN, INT32_MAX, draw.upto(-3, 99), far});
}

// The arrays of a plan are as long as the longest ones that are allowed: then each count is refused, or is right.
Plan longest(Random& draw, const Made& made, const Model& m, Step& step, float* state) {
    Plan plan;
    plan.states.resize(m.most_rows, draw.one_in(9) ? nullptr : state);
    const int chunks = draw.upto(1, std::min(8, m.most_rows));
    for (int c = 0; c < chunks; c++) {
        const int rows = made.recurrent ? 1 : draw.upto(1, m.most_rows / chunks), first = draw.of({0, 5, POSITIONS - rows});
        const int slot = draw.upto(0, SLOTS - 1), length = made.state ? draw.upto(0, m.kept) : draw.upto(1, m.embeddings);
        const int second = m.pages ? (int)plan.tables.size() : c && !m.state && draw.one_in(2);
        plan.chunks.insert(plan.chunks.end(), {rows, second, slot, length});
        for (int i = 0; i < rows; i++) plan.positions.push_back(first + i);
        const int apart = draw.upto(1, rows);  // rows before it see up to it
        for (int i = 0; i < rows; i++) plan.seen.push_back(i < apart ? first + apart - 1 : first + i);
        for (int i = 0; m.pages && i <= (first + rows - 1) / m.page_size; i++)
            plan.tables.push_back(draw.upto(0, m.pages - 1));
    }
    const int rows = (int)plan.positions.size();
    for (int i = draw.upto(0, rows); i--;) plan.wanted.push_back(draw.upto(0, rows - 1));
    const int words = made.words ? made.words->outputs : 1;
    for (int i = 0; i < m.most_rows; i++) {
        plan.tokens.push_back(draw.upto(0, words - 1));
        plan.types.push_back(draw.upto(0, made.types - 1));
        if (made.adapters) plan.adapters.push_back(draw.upto(-1, made.adapters - 1));
        Wish wish(draw, made.widths.back());
        wish.draw.temperature = draw.of(ODD), wish.draw.top_p = draw.of(ODD), wish.draw.min_p = draw.of(ODD);
        wish.draw.point = draw.of(ODD), wish.draw.top_k = draw.of({0, -1, draw.upto(-9, 999)});
        plan.add(wish);
    }
    for (int i = m.pages ? draw.upto(0, 2) : 0; i--;) plan.copies.insert(plan.copies.end(), {2 * i, 2 * i + 1});
    for (int row = 0; made.state && m.pages && row < rows; row++)
        for (int i = draw.one_in(4) ? draw.upto(1, 2) : 0; i--;) {
            plan.saved_rows.push_back(row);
            plan.saved.push_back(draw.one_in(40) ? nullptr : state);
        }
    if (draw.one_in(2)) plan.seen.clear();
    step = plan.step(draw.of({WHOLE, WHOLE, HEADLESS, HEAD}));
    if (!plan.seen.empty()) plan.seen.resize(m.most_rows), step.seen = plan.seen.data();
    plan.positions.resize(m.most_rows);
    plan.wanted.resize(m.most_rows);
    plan.chunks.resize(4 * m.most_rows);
    if (m.pages) plan.tables.resize((size_t)m.most_rows * ((m.positions + m.page_size - 1) / m.page_size));
    step.positions = plan.positions.data(), step.chunks = plan.chunks.data();
    step.tables = plan.tables.data(), step.wanted = plan.wanted.data();
    const bool turned = m.turns_count == 1 && draw.one_in(2);  // by numbers of its own
    plan.angles.resize(turned ? (size_t)m.most_rows * m.turns[0].half : 1);
    for (float& angle : plan.angles) angle = draw.value();
    if (turned) step.cosines = step.sines = plan.angles.data();
    if (draw.one_in(20)) (draw.one_in(2) ? step.cosines : step.sines) = turned ? nullptr : plan.angles.data();
    if (draw.one_in(2)) step.tokens = nullptr;
    if (draw.one_in(3)) step.draws = nullptr;
    step.in_windows = draw.one_in(2), step.fed = draw.one_in(2);
    return plan;
}

int broken_plans(uint32_t seed, int count) {
    const Made made(seed, 0);
    Random draw{std::mt19937(seed + 2)};
    Opened opened(made, draw.of({1, 8, 40, 200}), draw.of({3, 7, 16}), 20);
    check(opened.open(draw.upto(1, 3), 0), "a model opens", seed);
    const Model& m = opened.model;
    for (size_t i = 0; i < opened.kept; i++) opened.pages[i] = (uint8_t)draw.upto(0, 63);  // finite
    std::vector<uint8_t> before(opened.pages, opened.pages + opened.kept);
    int refused = 0;
    std::vector<float> state(made.state);
    for (int i = 0; i < count; i++) {
        Step step;
        Plan plan = longest(draw, made, m, step, state.data());
        for (int j = 0; j < m.most_rows * made.widths[0]; j++) opened.buffers[0].data[j] = draw.value();
        const Step whole = step;
        std::vector<int32_t>* arrays[] = {&plan.positions, &plan.chunks, &plan.tables,
                                          &plan.wanted,    &plan.tokens, &plan.types, &plan.seen, &plan.saved_rows, &plan.adapters};
        int32_t* counts[] = {&step.rows, &step.wanted_count, &step.chunk_count, &step.table_size, &step.part};
        const int used[] = {whole.rows, 4 * whole.chunk_count, whole.table_size, whole.wanted_count, whole.rows, whole.rows,
                            step.seen ? whole.rows : 0, whole.save_count, made.adapters ? whole.rows : 0};
        for (int changes = draw.upto(0, 3); changes--;) {
            const int which = draw.upto(0, 8);
            const bool counted = draw.one_in(3) || !used[which];
            int32_t& number = counted ? *counts[draw.upto(0, 4)] : (*arrays[which])[draw.upto(0, used[which] - 1)];
            number = other(draw, number);
        }
        if (draw.one_in(3)) {  // counts of what is there only become smaller
            Draw& d = draw.of({&plan.draws.front(), &plan.draws.back()})[0];
            int32_t* numbers[] = {&d.choice, &d.edits, &d.edit_count, &d.bans, &d.ban_count, &d.found, &d.found_count,
                                  &d.asked, &d.allowed, &d.timestamps};
            int32_t* all[] = {&step.edit_count, &step.ban_count, &step.found_count, &step.allowed_size, &step.copy_count, &step.save_count};
            int32_t &number = *numbers[draw.upto(0, 9)], &extent = *all[draw.upto(0, 5)];
            if (draw.one_in(2)) number = other(draw, number);
            else extent = draw.of({0, -1, INT32_MIN, draw.upto(0, std::max(0, extent))});
            if (!plan.edits.empty() && draw.one_in(3)) plan.edits.back().token = other(draw, plan.edits.back().token);
            if (!plan.bans.empty() && draw.one_in(3)) plan.bans.back() = other(draw, plan.bans.back());
            if (!plan.found.empty() && draw.one_in(3)) plan.found.front().token = other(draw, plan.found.front().token);
            if (!plan.copies.empty() && draw.one_in(3)) plan.copies.back() = other(draw, plan.copies.back());
        }
        const bool fine = triolet_step(opened.handle, &step) == FINE;
        if (fine) before.assign(opened.pages, opened.pages + opened.kept);
        const bool kept = !opened.kept || !memcmp(before.data(), opened.pages, opened.kept);
        check(kept, "a plan that is refused changes nothing", seed);
        for (const Draw& one : plan.draws) {
            const bool known = fine && one.token >= -1 && one.token < made.widths.back();
            check(known || one.token == UNKNOWN, "a token is one of the vocabulary", seed);
        }
        refused += !fine;
    }
    return refused;
}

int broken_models(uint32_t seed, int count) {
    const Made made(seed, 1024);
    Random draw{std::mt19937(seed + 3)};
    int refused = 0;
    std::vector<float> state(made.state);
    for (int i = 0; i < count; i++) {
        Opened opened(made, draw.of({1, 5, 50}), 7, 20);
        Model& m = opened.model;
        const int kind = draw.upto(NORM, GATE), place = draw.upto(0, m.count - 1);  // rare kinds as often as others
        Operation* found = &opened.operations[place];
        for (Operation& one : opened.operations)
            if (one.kind == kind && draw.one_in(2)) found = &one;
        Operation& o = *found;
        Buffer& buffer = opened.buffers[draw.upto(0, m.buffer_count - 1)];
        Turns turns = made.turns;
        Matrix matrix = o.matrix ? *o.matrix : made.matrices.front();
        m.turns = &turns;
        if (o.matrix) o.matrix = &matrix;
        Step step;
        Plan plan = longest(draw, made, m, step, state.data());  // of the model before
        if (draw.one_in(3)) plan.tokens[0] = draw.upto(0, 9999);
        int32_t* numbers[] = {&o.kind, &o.from, &o.to, &o.wanted, &o.norm, &o.ending, &o.activation, &o.layer, &o.heads,
                              &o.kv_heads, &o.size, &o.turned, &o.table, &o.window, &o.paired, &m.threads,
                              &matrix.outputs, &matrix.planes, &m.kv_format, &o.ahead, &o.place, &o.column, &m.block, &o.value_size, &o.delta};
        int32_t* extents[] = {&m.count, &m.buffer_count, &m.turns_count, &m.most_rows, &m.positions, &m.layers, &m.pages,
                              &m.page_size, &opened.layers[draw.upto(0, LAYERS - 1)].width, &m.slots, &m.cross_heads, &m.embeddings, &m.cross_size,
                              &buffer.width, &turns.half, &matrix.inputs, &matrix.panels, &matrix.section_count, &o.distance_count,
                              &m.state, &m.kept, &m.kept_rows};
        const void** pointers[] = {(const void**)&o.gain, (const void**)&o.matrix, (const void**)&matrix.weights, (const void**)&matrix.sections,
                                   (const void**)&m.kv, (const void**)&m.cross,
                                   (const void**)&opened.layers[draw.upto(0, LAYERS - 1)].pages};
        for (int changes = draw.upto(0, 2); changes--;) {  // extents of what is there only become smaller
            int32_t &number = *numbers[draw.upto(0, 24)], &extent = *extents[draw.upto(0, 21)];
            if (draw.one_in(9)) *pointers[draw.upto(0, 6)] = nullptr;
            else if (draw.one_in(2)) number = other(draw, number);
            else extent = draw.of({0, -1, INT32_MIN, draw.upto(0, std::max(0, extent))});
        }
        if (o.kind == CONVOLVE && made.operations[found - opened.operations.data()].kind != o.kind)
            o.kind = NORM;  // whose gains are fewer
        if (m.kv_format == FLOAT32) m.kv_format = made.kv_format;  // whose numbers are not shorter than they lie there
        if (m.pages < 1) step.table_size = 0;
        if (m.threads > 8 && m.threads <= 64) m.threads = 8;
        if (opened.open(m.threads, 0)) triolet_step(opened.handle, &step);
        else refused++;
    }
    return refused;
}

}  // namespace

int main(int, char** arguments) {
    const uint32_t seed = (uint32_t)atoll(arguments[1]);
    const int rounds = atoi(arguments[2]), count = atoi(arguments[3]);
    int plans = 0, models = 0;
    for (uint32_t round = 0; round < (uint32_t)rounds; round++) {
        same_bits(seed + round);
        plans += broken_plans(seed + round, count);
        models += broken_models(seed + round, count);
    }
    printf("%d models, %ld steps, the same bits; of %d broken plans %d were refused, of as many models %d; level %d\n",
           rounds, steps, rounds * count, plans, models, (int)triolet_level());
}
