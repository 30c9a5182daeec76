// What the copies of compute.cpp, one for each instruction set, share with step.cpp.
#pragma once
#include "step.h"
#include "team.h"

constexpr int CHUNK = 128;    // positions whose scores are one softmax
constexpr int SPAN = 512;     // positions that one thread attends to; of few rows, several threads have one each
constexpr int BLOCK = 8;      // rows of a chunk that are attended together
constexpr int OWN_ROWS = 32;  // up to so many rows each thread normalizes for itself; more, all together before
constexpr int OWN_NARROWED = 8;  // the same where rows become smaller, too
constexpr int BATCH = 48;     // rows that a block of weights is read for
constexpr int LONG = 256;     // rows of a chunk whose attention may be quantized
constexpr int BAND = 192;     // rows whose inputs stay in the caches while all weights pass

static inline int panels_of(int outputs) { return (outputs + PANEL - 1) / PANEL; }
static inline int bytes_of(int format) { return format == FLOAT32 ? 4 : 2; }  // of a number

// Rows of one sequence; or of one slot, and how long that is; or of one of `Chunks`, which ``table`` names
struct Block { int32_t row, rows, table, length; };

// A sequence or a chunk: its rows, those of its state, and where these begin among the rows of all states and chunks; the
// last LSTM that changes its state; and which of a step's saves are its own
struct Chunk { int32_t row, rows, kept, start; float* state; const Operation* changed; int32_t saves, save_count; };

// All sequences, or all chunks: [most_rows] of them, as many batches of their rows, and whose each row of all states and
// chunks is, [most_rows + kept_rows]
struct Chunks { Chunk* of; Block* batches; int32_t* owners; int32_t count, batch_count; };

// Rows by what they ask for: their numbers, one kind after the other, and the parts of this order that ask for one kind,
// which is `table`. Kinds that nobody asks for have no part
struct Groups { int32_t *asked, *order, *starts; Block* parts; int32_t count, rows; };

struct Engine {
    Model model;
    Step step;          // a copy, whose plan is in the room; what its draws read is the caller's
    Block *blocks, *slots;  // [most_rows]
    Chunks sequences, chunks;
    int32_t owned;      // rows of all states and chunks
    int32_t block_count, slot_count, split;  // split: a piece of attention is one span of positions
    Phase* phases;      // copies; two for each operation: what comes before it, and the operation; and the draws
    int32_t *tokens, *types, *seen;  // [most_rows]
    uint8_t* ready;     // [most_rows][`ready_bytes`], of many rows: normalized, or quantized
    float* parts;       // of blocks: [kv_heads][spans][rows][group][2 + value_size]
    float *keys, *values;  // of all states and rows, in panels: [heads][rows / 32][size][32] and [heads][size / 32][rows][32]
    int32_t* come;      // [BLOCK][kv_heads] spans that are done
    Groups experts;     // of [most_rows][most experts of a row] that are asked for
    Groups adapted;     // of the rows that have an adapter
    int32_t most_spans, width;
    float* own[MOST_THREADS];  // each thread's: rows that it normalizes or quantizes, or what attention or a draw needs
};

int draw(const float* logits, int count, float largest, const Draw&, double* chances, int32_t* ids);

static inline int pairs_of(int inputs) { return (inputs + 1) / 2; }
static inline size_t pairs_bytes(int inputs) { return ((size_t)pairs_of(inputs) * 4 + 63) / 64 * 64; }
struct Chance { float value; int64_t expert; };
void route(const float* logits, const Operation&, float* weights, int32_t* asked, Chance* all);
void temper(const Operation&, float* numbers);
void group(Groups&, int count, int kinds);  // what is below 0 asks for nothing

// A row of inputs in int8, [groups][GROUP], its groups' scales, and the sums of their halves
static inline size_t quantized_bytes(int inputs) { return ((size_t)groups_of(inputs) * (GROUP + 12) + 63) / 64 * 64; }
static inline int planes_of(const Matrix& m) { return m.planes > 1 ? 2 : 1; }
static inline size_t ready_bytes(int inputs) {
    const size_t floats = ((size_t)inputs * 4 + 63) / 64 * 64, quantized = 2 * quantized_bytes(inputs);
    return floats > quantized ? floats : quantized;
}

static inline int phase_count(const Model& m) { return 2 * m.count + 2; }

struct Code {
    Share (*share_of)(const Engine&, int phase);
    void (*run)(Engine&, int phase, int thread, uint32_t round);
};
namespace level1 { Code code(); }
namespace level3 { Code code(); }
namespace level3_vnni { Code code(); }
namespace level4 { Code code(); }
namespace level5 { Code code(); }
