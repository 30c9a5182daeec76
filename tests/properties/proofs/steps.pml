/* The step protocol as a model for Spin: a sound cache manager of a step engine, its requests and its device. A step is
   planned for all requests that ask, in order; up to AHEAD steps are in flight; the device runs a step's frees, then
   its encodings, then its reads.

   It proves that the step protocol can be kept: there is a manager that breaks none of its promises, in any order of
   events. It proves nothing of an engine; for that there is the kit. Not modelled: sizes (all outputs have the size 1),
   budgets, encodings that fail, resets, the close, and what is larger than the room.

   Run by check.py beside it, which also plants the bugs below (-DBUG_...): the checker must find each. */

#ifndef KEYS
#define KEYS 2
#endif
#ifndef REQUESTS
#define REQUESTS 3
#endif
#ifndef ROOM
#define ROOM 1
#endif
#ifndef AHEAD
#define AHEAD 2
#endif

mtype = { away, asks, planned, has_read }

mtype phase[REQUESTS] = away;
bit held[REQUESTS];          /* in the books */
byte reading[REQUESTS];      /* steps in flight that read for it */
bit listed[KEYS];            /* in the books: on the device, or on its way there */
bit device[KEYS];
byte left;                   /* clients that have left before their read */
chan queue = [REQUESTS] of { byte };              /* who asks, in order */
chan flight = [AHEAD] of { byte, byte, byte };    /* frees, encodings and reads of a step, as bits */

#define KEY(r) ((r) % KEYS)
#define BIT(n) (1 << (n))
#define IN(set, n) (((set) >> (n)) & 1)
#define HOLDS(r, k) (r < REQUESTS && KEY(r) == k && held[r])
#if REQUESTS == 3
#define ANY(k) (HOLDS(0, k) || HOLDS(1, k) || HOLDS(2, k))
#else
#define ANY(k) (HOLDS(0, k) || HOLDS(1, k) || HOLDS(2, k) || HOLDS(3, k))
#endif
#ifdef BUG_EVICTS_HELD
#define IDLE(k) (listed[k] && !IN(encodes, k))
#else
#define IDLE(k) (listed[k] && !ANY(k) && !IN(encodes, k))
#endif

byte frees, encodes, wants, later, r, k, i, count, number;

inline taken() {
  count = 0;
  for (i : 0 .. KEYS - 1) { count = count + listed[i] }
}

inline plan_for(who) {       /* hit, encode or later */
  k = KEY(who);
  taken();
  if
  :: listed[k] ->
     held[who] = 1;
     wants = wants | BIT(who)
#ifdef BUG_ENCODES_FOR_EACH
     ; encodes = encodes | BIT(k)
#endif
  :: else ->
     if
     :: count >= ROOM && IDLE(0) -> listed[0] = 0; frees = frees | BIT(0)
     :: count >= ROOM && IDLE(1) -> listed[1] = 0; frees = frees | BIT(1)
#if KEYS > 2
     :: count >= ROOM && IDLE(2) -> listed[2] = 0; frees = frees | BIT(2)
#endif
     :: else
     fi;
     taken();
     if
#ifdef BUG_IGNORES_ROOM
     :: true ->
#else
     :: count < ROOM ->
#endif
        listed[k] = 1;
        encodes = encodes | BIT(k);
        held[who] = 1;
        wants = wants | BIT(who)
     :: else -> later = 1
     fi
  fi
}

inline preempt(who) {        /* in the plan that served it: it gives everything back, and asks first next time */
  held[who] = 0;
  wants = wants & ~BIT(who);
#ifndef BUG_PHANTOM
  if
  :: IN(encodes, KEY(who)) && !ANY(KEY(who)) ->
     listed[KEY(who)] = 0
#ifdef BUG_FREES_WHAT_IS_CALLED_OFF
     ; frees = frees | BIT(KEY(who))
#endif
  :: else
  fi;
#endif
  if
#ifdef BUG_FORGETS_SHARERS
  :: IN(encodes, KEY(who)) -> encodes = encodes & ~BIT(KEY(who))
#else
  :: IN(encodes, KEY(who)) && !ANY(KEY(who)) -> encodes = encodes & ~BIT(KEY(who))
#endif
  :: else
  fi
}

proctype Planner() {
  bit preempted;
  do
  :: atomic {
       nfull(flight) && nempty(queue) ->
       later = 0;
       number = len(queue);
       do
       :: number > 0 && !later ->
          queue ? <r>;
          plan_for(r);
#ifdef BUG_OVERTAKES
          queue ? r;         /* who is told later goes to the end of the queue, and others on */
          if :: later -> queue ! r; later = 0 :: else -> phase[r] = planned fi;
#elif defined(BUG_FORGETS_WHO_WAITS)
          queue ? r;
          if :: later -> later = 0 :: else -> phase[r] = planned fi;
#else
          if :: later :: else -> queue ? r; phase[r] = planned fi;
#endif
          number--
       :: else -> break
       od;
       if                    /* the last one served may be preempted, once in a run */
       :: !preempted && wants ->
          preempted = 1;
          r = (IN(wants, 3) -> 3 : (IN(wants, 2) -> 2 : (IN(wants, 1) -> 1 : 0)));
          preempt(r);
          phase[r] = asks;
          number = len(queue);
          queue ! r;
          do                 /* to the front */
          :: number > 0 -> queue ? r; queue ! r; number--
          :: else -> break
          od
       :: true
       fi;
       for (i : 0 .. REQUESTS - 1) { reading[i] = reading[i] + IN(wants, i) }
       if
#ifdef BUG_LOSES_STEPS
       :: frees -> skip
#endif
       :: frees || encodes || wants -> flight ! frees, encodes, wants
       :: else
       fi;
       frees = 0; encodes = 0; wants = 0; later = 0; r = 0; k = 0; i = 0; count = 0; number = 0
     }
  od
}

proctype Device() {
  byte free, encode, read;
  do
  :: atomic {
       flight ? free, encode, read ->
       for (i : 0 .. KEYS - 1) {
         if :: IN(free, i) -> assert(device[i]); device[i] = 0 :: else fi      /* frees hit */
       }
       for (i : 0 .. KEYS - 1) {
         if :: IN(encode, i) -> assert(!device[i]); device[i] = 1 :: else fi   /* encode once */
       }
       count = 0;
       for (i : 0 .. KEYS - 1) { count = count + device[i] }
       assert(count <= ROOM);                                                  /* the room is kept */
       for (i : 0 .. REQUESTS - 1) {
         if
         :: IN(read, i) ->
            assert(device[KEY(i)]);                                            /* no use before ready, no free while held */
            reading[i]--;
            if :: phase[i] == planned && !reading[i] -> phase[i] = has_read :: else fi
         :: else
         fi
       }
       free = 0; encode = 0; read = 0; i = 0; count = 0
     }
  od
}

proctype Request(byte me) {
  do
  :: atomic { phase[me] == away -> phase[me] = asks; queue ! me }
  :: atomic { phase[me] == has_read -> phase[me] = away; held[me] = 0 }   /* at some time: it goes on meanwhile */
  od
}

proctype Leaver() {          /* clients that leave while they wait, or while a step in flight reads for them */
  byte who;
  do
  :: left < 2 ->
     select(who : 0 .. REQUESTS - 1);
     atomic {
       left++;
       if
       :: phase[who] == asks -> queue ?? eval(who); phase[who] = away
       :: phase[who] == planned -> phase[who] = away; held[who] = 0
       :: else
       fi;
       who = 0
     }
  :: break
  od
}

proctype Clock() {           /* time goes on where all others stand still, which Spin takes for an end */
  do :: left = left od
}

init {
  atomic {
    for (i : 0 .. REQUESTS - 1) { run Request(i) }
    i = 0;
    run Planner(); run Device(); run Leaver(); run Clock()
  }
}

#define WANTS(who) (phase[who] == asks || phase[who] == planned)
#define SERVED(who) (phase[who] == has_read || phase[who] == away)
ltl first { [] (WANTS(0) -> <> SERVED(0)) }
ltl second { [] (WANTS(1) -> <> SERVED(1)) }
ltl third { [] (WANTS(2) -> <> SERVED(2)) }
