// The C interface of a step. Python calls it by ctypes, and holds no lock meanwhile.
//
// A model is a list of operations over numbered buffers; a step runs them all over its rows, one row for each token
// fed.
// All memory but that of the threads is the caller's: weights, buffers, pages, plans. What a row computes depends on
// its own token, position and pages alone: not on the other rows, nor on how rows are cut into chunks, steps and pages.
#pragma once
#include "packings.h"

enum Format : int32_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, INT8 = 3, PAIRS = 4, INT8_16 = 5, PACKED = 6 };
static inline bool is_int8(int format) { return format == INT8 || format >= INT8_16; }
static inline bool is_narrowed(int format) { return is_int8(format) || format == PAIRS; }  // inputs become smaller, too
enum Kind : int32_t {
    NORM = 0, LINEAR = 1, TURN = 2, ATTEND = 3, NORM_ADD = 4, CROSS = 5, ATTEND_ALL = 6, LOOKUP = 7, CONVOLVE = 8,
    KEEP = 9, RECALL = 10, LSTM = 11, ROUTE = 12, EXPERTS = 13, MIX = 14, COPY = 15, RECUR = 16, GATE = 17, ADAPT = 18
};
enum Part : int32_t { WHOLE = 0, HEADLESS = 1, HEAD = 2 };  // of a model's operations: the head is the last one
enum Norm : int32_t { NO_NORM = 0, RMS = 1, LAYER_NORM = 2 };
enum Ending : int32_t { STORE = 0, ADD = 1, GATED = 2, ACTIVATED = 3, CAPPED = 4, GATED_BY = 5, ADD_ACTIVATED = 6 };
enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, SIGMOID = 4, QUICK_GELU = 5, RELU_SQUARED = 6 };
enum Choice : int32_t { NOTHING = 0, TOKEN = 1, BEAM = 2 };
enum Change : int32_t { ADDED = 0, SCALED = 1, REPLACED = 2 };
enum Fault : int32_t {
    FINE = 0, BAD_ROWS = 1, BAD_POSITION = 2, BAD_PAGE = 3, BAD_WANTED = 4, BAD_TABLE = 5, BAD_SLOT = 6, BAD_PART = 7, BAD_TOKEN = 8, BAD_DRAW = 9
};

// Weights [outputs][inputs] in panels of 32 outputs, side by side: [panels][inputs][32]. The last one is filled up with
// zeros. PAIRS: two inputs in bfloat16 of an output lie together, [panels][pairs][32][2], and inputs become bfloat16; an
// odd one has a zero. INT8 is Q8_32 and INT8_16 is Q8_0. PACKED: the panels are those of the sections, one section after
// the other. Of these three inputs are quantized, too, in `planes` of 8 bits, 1 or 2.
struct Section { int32_t packing, panels; const uint8_t* weights; };
struct Matrix {
    int32_t format, inputs, outputs, panels;
    const uint8_t* weights;  // or none, if there are sections
    const float* bias;       // [32 * panels], or none
    const Section* sections;
    const int32_t* order;    // [inputs] the input that each of the sections' inputs is; or none: the same
    int32_t section_count, planes;
};

struct Operation {
    int32_t kind, from, to;  // buffers that are read and written
    int32_t wanted;          // 1: over the rows whose logits are wanted, else over all; 2: the same, which lie side by side in ``from``
    // NORM, LINEAR, NORM_ADD, EXPERTS, GATE: of what is read. NORM and CONVOLVE: then the activation, if ``ending`` is ACTIVATED
    int32_t norm;
    float epsilon;
    const float *gain, *shift;  // [width]
    // LINEAR, LOOKUP. The latter writes the weights of each row's token, as many as there are inputs, by ``scale``, and
    // adds the numbers of its position, ``shift`` [distance_count][inputs], and those of its type, ``gain`` [heads]
    // [inputs], if there are some.
    // GATED: the first half of the panels are gates, times ``soft_cap`` if that is not 0, the other what they are
    // multiplied with. GATED_BY: reversed.
    // GATED with a ``cap``: gates are at most that, and the others, to which 1 is added, within it on both sides
    const Matrix* matrix;
    int32_t ending, activation;
    float cap;
    // LINEAR: what it computes is multiplied with ``scale``, before it is added or capped; 0: it is not.
    // TURN: queries and keys [heads + kv_heads][size] and values [kv_heads][value_size] of a row; the keys and values, if
    // there are some, go into its page, if the model has pages. Queries are multiplied with ``scale``, and with ``shift``
    // [distance_count] of their position, if there is some. ``gain`` [value_size] is of a norm of values, if they have one
    // ATTEND: of queries in ``from``. ``shift`` [heads]: scores of a key without a value, which all rows see, if there is
    // one. CROSS: the same over the keys and values of the row's slot; scales the queries.
    // ATTEND_ALL: each row attends to all rows of its sequence, before it and behind it, whose queries, keys and values
    // are in ``from``
    // CONVOLVE: each number of a row by its neighbours in ``distance_count`` rows of the sequence, ``window`` of them
    // before the row, by ``gain`` [distance_count][width], plus ``shift``: of `size` numbers from ``column`` on, or of all, if
    // `size` is 0
    // ATTEND_ALL, CONVOLVE: the rows of a chunk's state, at ``place``, stand before the chunk's: [kept] keys and values
    // [2][heads][size], or [window][width]. KEEP: the last ``window`` of these rows and of the chunk's, of which the
    // ``size`` numbers from ``column`` on are meant, become the state's
    // RECALL: ``size`` numbers of the state of a row's chunk. LSTM: of a row's gates [4][size], and the hidden and cell
    // state [2][size] of its chunk, which change; writes the hidden state (Hochreiter and Schmidhuber 1997)
    // ROUTE: chooses `heads` of `kv_heads` experts for each row, the likeliest by the logits in ``from``, and writes their
    // chances (of a softmax, or SIGMOID's), likeliest first; if ``together``, as parts of their own sum, or of ``epsilon`` where that is more, plus ``cap``. To choose,
    // ``gain`` [kv_heads] is added to the chances, if there is some. All operations choose as many of as many. Of more
    // than one of `column` groups of experts, `place` are chosen first, by the sums of their `ahead` best. If ``delta``: the
    // numbers of the experts in place of their chances
    // EXPERTS: as LINEAR, by the experts that were last chosen, which have as many panels each, one after the other, and
    // `size` outputs: [heads][size] of a row. They read the same, or each its own of [heads][distance_count].
    // LINEAR, if ``delta``: what the buffer `table` has of a row with an adapter is added to the outputs, before all else.
    // ADAPT: as LINEAR, by the matrix of each row's adapter; the `kv_heads` slots of adapters have as many panels each, one
    // after the other, and `size` outputs. Without ``places``: outputs of the rows with an adapter lie side by side, adapter
    // after adapter. With ``places`` [panels of one]: reads these, each panel as many as there are inputs from its place on,
    // and writes to their rows. Rows without an adapter are neither read nor written.
    // COPY: of a row, [heads][size] numbers, `window` apart from `column` on, to places `ahead` apart from `place` on, by
    // ``scale``: stored, added to what is there, or GATED: multiplied with it
    // MIX: the sum of [heads][size] of a row by its weights in the buffer `table`, by ``scale``: stored, or added
    // RECUR: each head of a chunk has a state [distance_count][size], at ``place`` in blocks of PANEL of the `size` numbers,
    // which row after row becomes decay * state + key * update; the row's output is query * state. Queries and keys
    // [kv_heads][distance_count] and values [heads][size] are in ``from``, from ``column`` on, or in the reverse order if
    // ``paired``; queries are multiplied with ``scale``. The buffer `table` has two numbers [2][heads] of a row, from ``ahead``
    // on, which become strength and decay. They and ``from`` are changed.
    // If ``delta``: strength is the sigmoid of the first number by ``cap``, decay e^(gain * softplus(second + shift)), queries
    // and keys get the length 1 (by ``epsilon``), and update is strength * (value - key * decay * state) (Yang et al. 2024, "Gated
    // Delta Networks"). Else: strength is softplus(first * soft_cap + shift), at least ``epsilon`` and at most ``cap``, decay
    // e^(gain * strength), update strength * value, and ``query_gain`` [heads] * value is added to the output, if there
    // is some (Dao and Gu 2024, "Mamba-2")
    // GATE: [heads][size] of a row, from ``column`` on, by as many numbers of the buffer `table`, from ``ahead`` on, or by one
    // for each head if ``distance_count`` is 1: these times ``scale``, activated if ``ending`` is ACTIVATED. ``norm`` is of each
    // head: of the product, or, if ``paired``, of what is multiplied; ``gain`` is [size], or [heads][size] if ``together``
    int32_t layer, heads, kv_heads, size;
    int32_t value_size;                    // of a value of TURN and ATTEND; 0: ``size``
    int32_t turned;                        // dimensions of a head from ``place`` on that are turned, in halves; 0: none
    int32_t table;                         // of cosines and sines, or a buffer of weights
    const float *query_gain, *key_gain;    // [size] of norms of each head, or none; both [heads][size] if ``together``
    float scale, soft_cap;                 // of scores, or of embeddings; 0: no cap
    int32_t window;                        // positions that a row sees, its own included; 0: all. Of ATTEND_ALL: up to its
                                           // block's first row, and ``ahead`` behind its block
    int32_t ahead, place, column;
    int32_t paired;                        // 1: dimensions are turned with their neighbours, not in halves
    int32_t together;                      // 1: all queries of a row have one norm, and all keys another one
    int32_t quantized;                     // 1: ATTEND_ALL multiplies in int8 in a sequence or chunk of LONG rows and more
    int32_t by_chunk;                      // ATTEND_ALL: 1: to the rows of the chunk alone
    int32_t distance_count, delta;
    const float* distances;                // [heads][distance_count], added to scores by how far a key is; or none.
                                           // ATTEND_ALL: from keys far before to far behind, the row's own in the middle
    // ATTEND_ALL: by how far a key is, as in ``distances``, a place, which never falls. To each score is added the row's
    // query by the key of that place, and the key by the query of that place, both [heads][places][size], in float32
    const int32_t* places;                 // [distance_count], or none
    const Matrix *place_keys, *place_queries;  // of as many panels for each head; or none
};

struct Buffer { float* data; int32_t width; };
struct Layer { uint8_t* pages; int32_t width; };  // [pages][page_size][width], keys before values; or none, of no width
struct Turns { const float *cosines, *sines; int64_t count; int32_t half; };  // [count][half]

struct Model {
    const Operation* operations;
    const Buffer* buffers;  // [rows][width] each; they may be others in the next step
    const Turns* turns;
    int32_t count, buffer_count, turns_count, threads;
    int32_t chooses;        // 1: steps may have draws
    int32_t most_rows, positions;
    int32_t kv_format;     // of pages and slots, of 32 or 16 bits; computed is in float32
    const Layer* kv;       // [layers], or none, of 0 pages
    int32_t layers, pages, page_size;
    const uint8_t* cross;  // [layers][2][slots][cross_heads][embeddings][size], keys before values; or none
    int32_t slots, cross_heads, embeddings, cross_size;
    int32_t state, kept, kept_rows;  // numbers of a chunk's state, or 0; the most rows that one has, and all of a step
    int32_t block;       // rows of a chunk that ATTEND_ALL's windows count as one place, from its first on; 1 at least
    uint8_t* room;       // for threads and phases; see `triolet_room`
};

// A change of one token's logit. SCALED: below zero multiplied, else divided
struct Edit { int32_t token, change; float value; };

// A token that is told: with its logit and the total of a beam, and its log-probability. -1: there is none
struct Found { int32_t token; float score, logprob; };

// What is asked of a row's logits, and chosen of them, which changes them. The first `asked` of what is found are tokens
// that are told by the logits as they are; the others become the likeliest. BEAM: the logits become log-probabilities,
// and no token is chosen. In this order: what is asked, log-probabilities of a beam, edits, bans, timestamps, what is
// allowed; and then the choice.
struct Draw {
    double temperature, top_p, min_p;  // 0: the likeliest; 1: all; 0: all
    double point;                      // in [0, 1), of the cumulative chances
    int32_t choice, top_k;             // 0: all
    int32_t edits, edit_count;         // where its own begin in the step's, and how many there are
    int32_t bans, ban_count;
    int32_t found, found_count, asked;
    int32_t allowed;     // where its bits begin in the step's, one for each token; -1: all are allowed
    int32_t timestamps;  // the first one: where they together are likelier than any token before, none before is allowed; or 0
    float total;         // of a beam
    int32_t token;       // -1: none is allowed
    float logprob;       // of it, by the logits that are left; NaN: they are broken, or none is
};

struct Step {
    int32_t rows, wanted_count, chunk_count, table_size;
    int32_t part;               // a `Part`; HEAD: of the `wanted_count` rows that are in its buffer, and nothing else counts
    const int32_t* positions;   // [rows], one after the other in a chunk if the model has pages
    const int32_t* chunks;      // [chunk_count][4]: rows of one sequence, position after position; where its pages begin;
                                // its slot, and how many embeddings are in it; or how many rows its state has. Without
                                // pages, the second number is 1 if the chunk continues the sequence of the one before,
                                // else 0; a chunk that has a state continues none
    const int32_t* tables;      // [table_size] pages
    const int32_t* wanted;      // [wanted_count] rows
    const int32_t* tokens;      // [rows] that are looked up, or none: buffer 0 is filled
    const int32_t* types;       // [rows] of these tokens, or none: all have type 0
    const int32_t* adapters;    // [rows] the slot of a row's adapter, or -1; or none: no row has one
    Draw* draws;                // [wanted_count], or none: nothing is chosen of the last buffer
    const Edit* edits;          // [edit_count]
    const int32_t* bans;        // [ban_count][2]: the first token and the one after the last
    Found* found;               // [found_count]
    const uint8_t* allowed;     // [allowed_size]
    const float *cosines, *sines;  // [rows][half] in place of those of positions in the only table; or none
    const int32_t* seen;        // [rows] the last position that a row sees, which its chunk has and which never falls in
                                // it; or none: its own
    float* const* states;       // [chunk_count] of [state], each written; null: a chunk has none, if its model has `kept` and
                                // no pages
    const int32_t* copies;      // [copy_count][2]: pages that are copied before all else, from one to another; none is both
    float* const* saved;        // [save_count] of [state], each written with the state of a row's chunk as it is behind the row
    const int32_t* saved_rows;  // [save_count] of these, ascending; only if the model has pages
    int32_t edit_count, ban_count, found_count, allowed_size, copy_count, save_count;
    int32_t in_windows;         // 1: ``seen`` is for attention with a window; elsewhere a row sees up to its own
    int32_t fed;                // 1: buffer 0 is filled although there are tokens, which are looked up for the others
};

#pragma GCC visibility push(default)
extern "C" {
size_t triolet_room(const Model*);  // bytes, by 64; 0: an operation would leave what the model names
void* triolet_open(const Model*, int32_t level);  // null: the same, or there are no threads
void triolet_close(void*);
int32_t triolet_step(void*, const Step*);
uint32_t triolet_made_of();  // the checksum of the sources
// Of a `Packing`: the bytes of a panel; blocks [outputs][inputs] made panels; and weights of `count` outputs of panels,
// [count][inputs]
int64_t triolet_packed_bytes(int32_t packing, int32_t inputs);
void triolet_pack(int32_t packing, const uint8_t* blocks, int32_t outputs, int32_t inputs, uint8_t* to);
void triolet_unpack(int32_t packing, const uint8_t* panels, int32_t inputs, const int64_t* outputs, int64_t count, float* to);
int32_t triolet_level();  // the best one of this processor: 1, 3 or 4, as of x86-64, 4 with products of bytes (VNNI), 5 also of bfloat16
}
#pragma GCC visibility pop
