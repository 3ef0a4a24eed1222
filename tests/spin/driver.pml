/* Who drives a queue of operations: threads that wait, else the progress engine. No operation is left to nobody.

   | here                | code                                                                             |
   |---------------------|----------------------------------------------------------------------------------|
   | queued, arrived     | operations in the queue, and how many of them can end (posts of peers)           |
   | finished            | operations that have ended, in order                                             |
   | waiters,            | Driver::waiters, Driver::left_to_waiters (csrc/engine/driver.h)                  |
   | left_to_waiters     |                                                                                  |
   | activated, news     | the driver is in ProgressEngine::active_; ProgressEngine::news_                  |
   | mutex, engine_mutex | Driver::mutex, ProgressEngine::mutex_                                            |
   | proctype waiter     | Communicator::wait_driving with its WaiterScope (csrc/engine/communicator.cpp)   |
   | proctype starter    | Communicator::start: submits, activates the engine, and counts on the end        |
   | proctype engine     | ProgressEngine::loop for one driver                                              |
   | proctype peers      | let each operation end, at any time                                              |

   Each WAITERS thread waits for one operation, the starter for none of its own; the wake-ups themselves are bell.pml's.

   Broken variant, which must deadlock:
     FORGOTTEN   the engine drops a driver that somebody waits on without a note, and the waiter that leaves goes by what it
                 saw when it last looked: an operation that was started in between is driven by nobody */

#ifndef WAITERS
#define WAITERS 1
#endif
#ifndef STARTERS
#define STARTERS 1
#endif
#define OPERATIONS (WAITERS + STARTERS)

byte queued, arrived, finished, waiters;
bool activated, news, left_to_waiters;
bool mutex, engine_mutex;

inline lock(m) { atomic { !m -> m = true } }

/* CollectiveQueue::progress */
inline progress() {
  d_step {
    if
    :: arrived < queued -> finished = arrived
    :: else -> finished = queued
    fi
  }
}

inline activate() {
  lock(engine_mutex);
  activated = true;
  news = true;
  engine_mutex = false
}

proctype waiter() {
  byte mine;
  bool pending = false;
  atomic { queued++; mine = queued };
  waiters++;
  do
  :: lock(mutex);
     progress();
     pending = (finished < queued);
     mutex = false;
     if
     :: finished >= mine -> break
     :: finished < mine -> (finished >= mine || (finished < arrived && finished < queued))
     fi
  od;
  waiters--;
#ifndef FORGOTTEN
  atomic { pending = (pending || left_to_waiters); left_to_waiters = false };
#endif
  if
  :: pending -> activate()
  :: !pending
  fi
}

proctype starter() {
  byte mine;
  atomic { queued++; mine = queued };
  activate();
  finished >= mine
}

proctype engine() {
  bool keep = false;
end:
  do
  :: (activated && (news || (finished < arrived && finished < queued) )) ->
     lock(engine_mutex);
     news = false;
     engine_mutex = false;
     keep = false;
     if
     :: waiters == 0 ->
        lock(mutex);
        progress();
        keep = (finished < queued);
        mutex = false
     :: waiters > 0 ->
#ifndef FORGOTTEN
        left_to_waiters = true;
        if
        :: waiters == 0 -> news = true  /* the last one left meanwhile, perhaps before it could see the note */
        :: else
        fi
#else
        skip
#endif
     fi;
     lock(engine_mutex);
     if
     :: !keep && !news -> activated = false
     :: keep || news
     fi;
     engine_mutex = false
  od
}

proctype peers() {
  do
  :: arrived < OPERATIONS -> arrived++
  :: arrived == OPERATIONS -> break
  od
}

init {
  byte i = 0;
  atomic {
    run engine();
    run peers();
    do
    :: i < WAITERS -> run waiter(); i++
    :: i == WAITERS -> break
    od;
    i = 0;
    do
    :: i < STARTERS -> run starter(); i++
    :: i == STARTERS -> break
    od
  }
}
