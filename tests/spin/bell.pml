/* The bell: no wake-up is lost (docs/memory_model.md, "Signals and bells").

   | here                | code                                                                             |
   |---------------------|----------------------------------------------------------------------------------|
   | rings, sleepers     | Bell::rings, Bell::sleepers (csrc/sync/bell.h) of one endpoint                   |
   | queued[t]           | thread t of the endpoint sleeps in FUTEX_WAIT                                    |
   | signals[p]          | a signal word of peer p, which posts ROUNDS times without waiting for anybody    |
   | arrivals            | an arrival counter (Group::count_arrival), with ONLY_LAST_RINGS                  |
   | proctype poster     | a post: store the signal, load the sleepers, Bell::ring                          |
   | proctype sleeper    | a thread in wait_slice and Bell::sleep_unless that awaits the signals one by one |

   FUTEX_WAIT compares and queues in one step, as the kernel does. There are no time-outs: a lost wake-up is a deadlock.

   Sizes: THREADS (of the endpoint), POSTERS, ROUNDS. ONLY_LAST_RINGS: the thread awaits all signals, and of the posters
   only the last to arrive rings.

   Broken variants, each of which must deadlock:
     LOOK_THEN_ANNOUNCE   the sleeper does not look again after it has announced itself
     LOAD_BELL_LATE       the sleeper loads the bell after it has looked
     SILENT_RING          the ring wakes but does not count: a FUTEX_WAIT that comes after it sleeps on
     WAKE_ONE             the ring wakes one thread of the endpoint, perhaps not the one that can go on
     RELEASE_POST         the signal is stored in release order only: it may show after the sleepers were loaded
     COUNT_THEN_STORE     with ONLY_LAST_RINGS: a rank counts its arrival before it stores its signal */

#ifndef THREADS
#define THREADS 1
#endif
#ifndef POSTERS
#define POSTERS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif

byte rings, sleepers, arrivals;
byte signals[POSTERS];
bool queued[THREADS];

#ifdef RELEASE_POST
/* The store buffer of a poster's core: it lets the newest value out at any time, at the latest before the next
   read-modify-write. */
byte buffered[POSTERS];
#define STORE(p, value) buffered[p] = value
#define READ_MODIFY_WRITE(p) signals[p] == buffered[p]

proctype store_buffer(byte p) {
end:
  do
  :: signals[p] != buffered[p] -> signals[p] = buffered[p]
  od
}
#else
#define STORE(p, value) signals[p] = value
#define READ_MODIFY_WRITE(p) skip
#endif

inline futex_wake() {
  d_step {
    t = 0;
    do
#ifdef WAKE_ONE
    :: t < THREADS && queued[t] -> queued[t] = false; t = THREADS
#else
    :: t < THREADS && queued[t] -> queued[t] = false; t++
#endif
    :: t < THREADS && !queued[t] -> t++
    :: t == THREADS -> break
    od;
    t = 0
  }
}

inline ring_sleepers(p) {
  if
  :: sleepers != 0 ->
     READ_MODIFY_WRITE(p);
#ifndef SILENT_RING
     rings++;
#endif
     futex_wake()
  :: else
  fi
}

proctype poster(byte p) {
  byte round = 1, t = 0;
  bool last = false;
  do
  :: round <= ROUNDS ->
#ifdef ONLY_LAST_RINGS
#ifdef COUNT_THEN_STORE
     d_step { arrivals++; last = (arrivals == POSTERS) };
     STORE(p, round);
#else
     STORE(p, round);
     d_step { arrivals++; last = (arrivals == POSTERS) };
#endif
     if
     :: last -> ring_sleepers(p)
     :: else
     fi;
#else
     STORE(p, round);
     ring_sleepers(p);
#endif
     round++
  :: else -> break
  od
}

/* Thread t awaits round after round, in each one signal after the other; of two threads each starts with another one. */
proctype sleeper(byte thread) {
  byte round = 1, seen = 0, before = 0;
  byte p = thread % POSTERS;
  do
  :: round <= ROUNDS && signals[p] >= round ->        /* arrived */
     p = (p + 1) % POSTERS;
     seen++;
     if
     :: seen == POSTERS -> seen = 0; round++
     :: else
     fi
  :: round <= ROUNDS && signals[p] < round ->
#ifndef LOAD_BELL_LATE
     before = rings;
#endif
     sleepers++;
     if
#ifndef LOOK_THEN_ANNOUNCE
     :: signals[p] >= round
#endif
     :: else ->
#ifdef LOAD_BELL_LATE
        before = rings;
#endif
        if                                            /* FUTEX_WAIT */
        :: d_step { rings == before -> queued[thread] = true }; !queued[thread]
        :: rings != before
        fi
     fi;
     before = 0;
     sleepers--
  :: round > ROUNDS -> break
  od
}

init {
  byte i = 0;
  atomic {
    do
    :: i < POSTERS ->
       run poster(i);
#ifdef RELEASE_POST
       run store_buffer(i);
#endif
       i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < THREADS -> run sleeper(i); i++
    :: else -> break
    od;
    i = 0
  }
}
