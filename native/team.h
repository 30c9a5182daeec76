// The threads of a model. A step is a list of phases, a phase a number of pieces. A phase is over when all its pieces
// are done, not when all threads have come: nobody waits for a thread that sleeps, the others take its pieces. So a
// thread may come when its step is over. It finds the round of another step wherever it asks for a piece, and gets none;
// whoever has a piece knows that the step is not over.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <climits>
#include <cstdint>

constexpr int MOST_THREADS = 64;
constexpr int SPIN = 2000;  // rounds before a thread sleeps: spinning for ever would starve a busy neighbour

struct alignas(64) Counter { uint64_t value; };  // the round, and in the lower half a count
struct alignas(64) Phase {
    Counter done;                // pieces
    int32_t total, piece, sleepers;
    uint32_t signal;             // another whenever the phase begins or is over: what sleepers wait for
    Counter next[MOST_THREADS];  // of each thread's part
};

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
static inline void futex(void* at, int op, uint32_t value) { syscall(SYS_futex, at, op, value, nullptr, nullptr, 0); }

static inline uint64_t of_round(uint32_t round) { return (uint64_t)round << 32; }
static inline uint64_t seen(Counter& counter) { return __atomic_load_n(&counter.value, __ATOMIC_SEQ_CST); }

struct Share { int total, piece; };  // pieces, and how many are taken at a time

static inline void wake(Phase& phase) {
    __atomic_add_fetch(&phase.signal, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&phase.sleepers, __ATOMIC_SEQ_CST)) futex(&phase.signal, FUTEX_WAKE_PRIVATE, INT_MAX);
}

static inline void prepare(Phase& phase, Share share, int threads, uint32_t round) {
    // first the round, with nothing to take: who comes late must not take a piece of the old round by the new total
    for (int t = 0; t < threads; t++) __atomic_store_n(&phase.next[t].value, of_round(round) | INT_MAX, __ATOMIC_SEQ_CST);
    __atomic_store_n(&phase.total, share.total, __ATOMIC_RELEASE);
    __atomic_store_n(&phase.piece, share.piece, __ATOMIC_RELEASE);
    for (int t = 0; t < threads; t++) __atomic_store_n(&phase.next[t].value, of_round(round), __ATOMIC_RELEASE);
    __atomic_store_n(&phase.done.value, of_round(round), __ATOMIC_SEQ_CST);
    wake(phase);  // who sleeps in it still is of another round
}

// The first of up to `piece` pieces of the part of `size` that a thread takes; -1: none is left, or the step is over.
static inline int take(Counter& next, int piece, int size, uint32_t round) {
    uint64_t value = __atomic_load_n(&next.value, __ATOMIC_ACQUIRE);
    do {
        if (value >> 32 != round || (int)(uint32_t)value >= size) return -1;
    } while (!__atomic_compare_exchange_n(&next.value, &value, value + piece, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return (int)(uint32_t)value;
}

static inline void finish(Phase& phase, int mine) {
    const int total = __atomic_load_n(&phase.total, __ATOMIC_RELAXED);  // before it may be another round's
    const uint64_t now = __atomic_add_fetch(&phase.done.value, mine, __ATOMIC_SEQ_CST);
    if ((int)(uint32_t)now == total) wake(phase);
}

static inline bool is_over(uint64_t done, const Phase& phase, uint32_t round) {
    return done >> 32 != round || (int)(uint32_t)done >= __atomic_load_n(&phase.total, __ATOMIC_RELAXED);
}

static inline void await(Phase& phase, uint32_t round) {
    for (int turn = 0; !is_over(seen(phase.done), phase, round); turn++) {
        if (turn < SPIN) {
            relax();
            continue;
        }
        __atomic_add_fetch(&phase.sleepers, 1, __ATOMIC_SEQ_CST);
        const uint32_t signal = __atomic_load_n(&phase.signal, __ATOMIC_SEQ_CST);
        if (!is_over(seen(phase.done), phase, round)) futex(&phase.signal, FUTEX_WAIT_PRIVATE, signal);
        __atomic_add_fetch(&phase.sleepers, -1, __ATOMIC_SEQ_CST);
    }
}
