/* The encoder ledger as a model for Spin: the life of entries (table.pml, made of TRANSITIONS in core/ledger_table.py),
   the queue of acquires, eviction under pressure and after idle time, the device, a lost generation, and the close.
   Everything that happens is one message to the ledger, as in actors/encoder_cache.py, or one action of the device, so
   each is atomic. The device acts first, and the ledger hears of it later.

   Not modelled: sizes (all outputs have the size 1), batches of several encodings and their halves, priorities (acquires
   wait in the order of their arrival), batches that are too large for the memory, the order of eviction (any idle entry
   may go first), and refusals of what can never fit. The properties in tests/properties/ have these.
   Run by check.py beside it, which also plants the bugs below (-DBUG_...): the checker must find each. */

#include "table.pml"

#ifndef KEYS
#define KEYS 2
#endif
#ifndef REQUESTS
#define REQUESTS 3
#endif
#ifndef ROOM
#define ROOM 1
#endif

mtype = { away, waits, holds, reads }

mtype life[KEYS] = absent;   /* what the ledger says */
bit device[KEYS];            /* what the device has */
bit failed_alone[KEYS];
mtype phase[REQUESTS] = away;
byte taken;
bit closed;
byte withdrawn;
bit evicted;                 /* after idle time: once is enough for every interleaving */
chan queue = [REQUESTS] of { byte };  /* acquires that wait, in order */
chan to_encode = [KEYS] of { byte };  /* reserved entries, in order */
chan dispatches = [KEYS] of { byte };   /* what the device was told, in order */
chan frees = [KEYS] of { byte };
chan encoded_facts = [KEYS] of { byte, bit };  /* what the device has done, and the ledger has yet to hear */
chan freed_facts = [KEYS] of { byte };

#define KEY(r) ((r) % KEYS)
#define HAS(r, k) (r < REQUESTS && KEY(r) == k && (phase[r] == holds || phase[r] == reads))
#define READS(r, k) (r < REQUESTS && KEY(r) == k && phase[r] == reads)
#define WAITS(r, k) (r < REQUESTS && KEY(r) == k && phase[r] == waits)
#if REQUESTS == 3
#define ANY(what, k) (what(0, k) || what(1, k) || what(2, k))
#else
#define ANY(what, k) (what(0, k) || what(1, k) || what(2, k) || what(3, k))
#endif

#define HELD(k) (ANY(HAS, k) -> 1 : 0)
#define OFFERED(k) (life[k] == ready)

mtype was = absent;
byte k, r, i, room, lacking;  /* of the message that is handled; the same between two messages */

inline change(key, what) {
  was = life[key];
  look_up(life[key], what, HELD(key));
  if
  :: was != reserved && life[key] == reserved -> to_encode ! key
  :: was == reserved && life[key] != reserved -> to_encode ?? eval(key)
  :: else
  fi;
  if
  :: life[key] == absent -> failed_alone[key] = 0  /* the entry is forgotten, and all that it knows */
  :: else
  fi;
  was = absent
}

inline tell_readers(key) {   /* the output is ready: all who hold it may read */
  for (i : 0 .. REQUESTS - 1) {
    if
    :: KEY(i) == key && phase[i] == holds -> assert(device[key]); phase[i] = reads
    :: else
    fi
  }
}

#ifdef BUG_RESURRECTS
#define MUST_WAIT(k) (life[k] == absent && taken >= ROOM)
#elif defined(BUG_OVERBOOKS)
#define MUST_WAIT(k) (life[k] == freeing_state)
#else
#define MUST_WAIT(k) (life[k] == freeing_state || (life[k] == absent && taken >= ROOM))
#endif

inline serve() {             /* from the first wait on, until one must go on waiting */
  do
  :: nempty(queue) ->
     queue ? <r>;
     k = KEY(r);
     if
     :: MUST_WAIT(k) -> break
     :: else ->
        queue ? r;
        if :: life[k] == absent -> taken++ :: else fi;
        phase[r] = holds;
        change(k, acquire);
#ifndef BUG_TELLS_NO_READERS
        if :: OFFERED(k) -> tell_readers(k) :: else fi
#endif
     fi
  :: empty(queue) -> break
  od
}

inline count_room() {
  room = ROOM - taken;
  lacking = 0;
  for (i : 0 .. KEYS - 1) {
    if :: life[i] == freeing_state -> room++ :: else fi;
    if :: ANY(WAITS, i) && (life[i] == absent || life[i] == freeing_state) -> lacking++ :: else fi
  }
}

#ifdef BUG_EVICTS_HELD
#define EVICTABLE(k) (life[k] == idle || life[k] == ready)
#else
#define EVICTABLE(k) (life[k] == idle)
#endif

#ifdef BUG_CLOSE_KEEPS_THE_IDLE
#define PRESSED (room < lacking)
#else
#define PRESSED (closed || room < lacking)
#endif

inline evict_one(key) {
  assert(!ANY(READS, key));  /* no free while held */
  change(key, evict);
#ifdef BUG_FREES_TWICE
  if :: len(frees) < KEYS - 1 -> frees ! key :: else fi;
#endif
  frees ! key
}

inline make_room() {         /* which idle entry goes first is left open: any may */
  do
  :: count_room();
     if
     :: PRESSED && EVICTABLE(0) && !ANY(WAITS, 0) -> evict_one(0)
     :: PRESSED && EVICTABLE(1) && !ANY(WAITS, 1) -> evict_one(1)
#if KEYS > 2
     :: PRESSED && EVICTABLE(2) && !ANY(WAITS, 2) -> evict_one(2)
#endif
     :: else -> break
     fi
  od;
  if                         /* an idle entry that others wait for goes for the first wait alone */
  :: len(queue) > 0 && room < 1 && EVICTABLE(0) -> evict_one(0)
  :: len(queue) > 0 && room < 1 && EVICTABLE(1) -> evict_one(1)
#if KEYS > 2
  :: len(queue) > 0 && room < 1 && EVICTABLE(2) -> evict_one(2)
#endif
  :: else
  fi
}

#define BELIEVED(k) (OFFERED(k) || life[k] == idle)
#define POSSIBLE(k) (BELIEVED(k) || life[k] == encoding || life[k] == freeing_state)

inline check() {             /* what the books say is on the device is there, and nothing that they do not know */
  assert(taken <= ROOM);
  room = 0;
  for (i : 0 .. KEYS - 1) {
    if :: life[i] != absent -> room++ :: else fi;
    assert(!BELIEVED(i) || device[i]);
    assert(POSSIBLE(i) || !device[i]);
    assert(!ANY(READS, i) || OFFERED(i))
  }
  assert(taken == room);
  k = 0; r = 0; i = 0; room = 0; lacking = 0
}

inline decide() { serve(); make_room(); check() }

inline part(request) {       /* it gives its hold back */
  phase[request] = away;
  k = KEY(request);
  change(k, release);
  if :: life[k] == absent -> taken-- :: else fi
}

proctype Request(byte me) {
  do
  :: atomic {
       !closed && phase[me] == away ->
       phase[me] = waits;
       queue ! me;
#ifdef BUG_HITS_OVERTAKE
       if
       :: OFFERED(KEY(me)) -> queue ?? eval(me); phase[me] = holds; change(KEY(me), acquire); tell_readers(KEY(me))
       :: else
       fi;
#endif
       decide()
     }
  :: atomic { phase[me] == reads -> part(me); decide() }
  od
}

proctype Impatient() {       /* withdraws a few acquires, or none */
  byte who;
  do
  :: withdrawn < 2 ->
     select(who : 0 .. REQUESTS - 1);
     atomic {
       withdrawn++;
       if
       :: phase[who] == waits -> queue ?? eval(who); phase[who] = away; decide()
       :: phase[who] == holds -> part(who); decide()
       :: else
       fi;
       who = 0
     }
  :: break
  od
}

proctype Encoder() {
  byte key;
  bit stored;
  do
  :: atomic {
       nempty(to_encode) ->
       to_encode ? <key>;
       change(key, dispatched);
       dispatches ! key;
#ifdef BUG_ENCODES_TWICE
       if :: nfull(dispatches) -> dispatches ! key :: else fi;
#endif
       key = 0; check()
     }
  :: atomic {                /* the device stores, or it fails */
       nempty(dispatches) && nfull(encoded_facts) ->
       dispatches ? key;
       if
       :: true ->
          assert(!device[key]);  /* encode once */
#ifndef BUG_STORES_NOTHING
          device[key] = 1;
#endif
          encoded_facts ! key, 1
       :: true -> encoded_facts ! key, 0
       fi;
       key = 0; check()
     }
  :: atomic {
       encoded_facts ? key, stored ->
       if
       :: stored ->
          failed_alone[key] = 0;
          change(key, encoded);
          if :: OFFERED(key) -> tell_readers(key) :: else fi
       :: else ->            /* failed: tried once more, then its holders are refused */
          if
          :: failed_alone[key] ->
             for (i : 0 .. REQUESTS - 1) {
               if :: HAS(i, key) -> phase[i] = away :: else fi
             }
             failed_alone[key] = 0
          :: else -> failed_alone[key] = 1
          fi;
          change(key, encode_failed);
          if :: life[key] == absent -> taken-- :: else fi
       fi;
       key = 0; stored = 0; decide()
     }
  od
}

proctype Freer() {
  byte key;
  do
  :: atomic {
       nempty(frees) && nfull(freed_facts) ->
       frees ? key;
       assert(device[key]);  /* frees hit */
#ifndef BUG_FREES_NOTHING
       device[key] = 0;
#endif
#ifndef BUG_TELLS_OF_NO_FREE
       freed_facts ! key;
#endif
       key = 0; check()
     }
  :: atomic {
       freed_facts ? key ->
       change(key, freed);
#ifndef BUG_LOSES_ROOM
       taken--;
#endif
       key = 0; decide()
     }
  od
}

proctype Clock() {           /* finds an entry idle for long, once or never */
  do
  :: atomic { life[0] == idle && !ANY(WAITS, 0) && !evicted -> evicted = 1; evict_one(0); decide() }
  :: atomic { life[1] == idle && !ANY(WAITS, 1) && !evicted -> evicted = 1; evict_one(1); decide() }
#if KEYS > 2
  :: atomic { life[2] == idle && !ANY(WAITS, 2) && !evicted -> evicted = 1; evict_one(2); decide() }
#endif
  :: evicted = 1             /* never again; and time goes on where all others stand still, which Spin takes for an end */
  od
}

proctype Loss() {            /* the runner restarts, or never does */
  if
  :: atomic {
       true ->
       do :: dispatches ? _ :: empty(dispatches) -> break od;
       do :: frees ? _ :: empty(frees) -> break od;
       do :: encoded_facts ? _, _ :: empty(encoded_facts) -> break od;
       do :: freed_facts ? _ :: empty(freed_facts) -> break od;
#ifndef BUG_LOSS_LEAVES_READERS
       for (r : 0 .. REQUESTS - 1) {
         if :: phase[r] == reads -> phase[r] = holds :: else fi
       }
#endif
       for (k : 0 .. KEYS - 1) {
         device[k] = 0;
         if
#ifdef BUG_LOSS_FORGETS_THE_IDLE
         :: life[k] != absent && life[k] != idle ->
#else
         :: life[k] != absent ->
#endif
            change(k, lost_change);
            if :: life[k] == absent -> taken-- :: else fi
         :: else
         fi
       }
       decide()
     }
  :: true
  fi
}

proctype Close() {           /* the end of the engine, or never */
  if
  :: atomic {
       true ->
       closed = 1;
       for (r : 0 .. REQUESTS - 1) {
         if
         :: phase[r] == waits -> queue ?? eval(r); phase[r] = away
         :: phase[r] == holds || phase[r] == reads -> part(r)
         :: else
         fi
       }
       decide()
     }
  :: true
  fi
}

init {
  atomic {
    for (i : 0 .. REQUESTS - 1) { run Request(i) }
    i = 0;
    run Impatient(); run Encoder(); run Freer(); run Clock(); run Loss(); run Close()
  }
}

#define ASKS(who) (phase[who] == waits || phase[who] == holds)
#define ANSWERED(who) (phase[who] == reads || phase[who] == away)
ltl first { [] (ASKS(0) -> <> ANSWERED(0)) }    /* every acquire is answered; 0 and 2 share a key where there are two */
ltl second { [] (ASKS(1) -> <> ANSWERED(1)) }
ltl third { [] (ASKS(2) -> <> ANSWERED(2)) }
#if KEYS > 2
ltl freed_at_last { [] (closed -> <> [] (taken == 0 && !device[0] && !device[1] && !device[2])) }
#else
ltl freed_at_last { [] (closed -> <> [] (taken == 0 && !device[0] && !device[1])) }
#endif
