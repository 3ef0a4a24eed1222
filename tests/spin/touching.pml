/* Direct access to tensors of others: nobody reads or writes memory that its owner has given back to its user, also where some
   ranks give up (docs/memory_model.md, "Tensors that peers reach directly").

   | here               | code                                                                                |
   |--------------------|-------------------------------------------------------------------------------------|
   | posted             | the handshake's signal                                                              |
   | touching           | GroupPage::touching, set by Group::Touching (csrc/collectives/group.cpp)            |
   | poisoned           | GroupPage::state                                                                    |
   | done               | the round of PeerTensors::finish                                                    |
   | returned           | the operation has ended on this rank: its tensor is its user's again                |
   | give_up            | CollectiveQueue::fail_front, still_touching: at a deadline, an abort, a death       |
   | access             | a block of a tensor of another rank is read or written                              |

   Steps are sequentially consistent, as the code's stores and loads of these words are.

   Broken variants:
     NO_LOOK            a rank does not look at the states of the others before it accesses
     LOOK_FIRST         it looks, and sets `touching` only then
     NO_WAIT            a rank that gives up does not wait for those that touch
     WAIT_FIRST         it waits, and poisons only then
     DONE_EARLY         a rank posts its round before its last access */

#ifndef N
#define N 3
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif

bool posted[N], touching[N], poisoned[N], done[N], returned[N];

/* An access takes two steps: it begins and it ends while the owner has not returned. */
inline access(owner) {
  assert(!returned[owner]);
  assert(!returned[owner])
}

proctype rank(byte me) {
  byte r = 0, block = 0;
  bool seen = false;
  posted[me] = true;
  do
  :: r < N && posted[r] -> r++
  :: r < N && !posted[r] -> goto give_up      /* at a deadline, which can be any moment */
  :: r == N -> break
  od;
#ifndef LOOK_FIRST
  touching[me] = true;
#endif
  r = 0;
#ifndef NO_LOOK
  do
  :: r < N -> seen = seen || poisoned[r]; r++
  :: r == N -> break
  od;
#endif
#ifdef LOOK_FIRST
  touching[me] = true;
#endif
  if
  :: seen -> touching[me] = false; goto give_up
  :: !seen
  fi;
#ifdef DONE_EARLY
  done[me] = true;
#endif
  do
  :: block < BLOCKS ->
     r = 0;
     do
     :: r < N && r != me -> access(r); r++
     :: r < N && r == me -> r++
     :: r == N -> break
     od;
     block++
  :: block == BLOCKS -> break
  od;
  touching[me] = false;
  done[me] = true;
  r = 0;
  do
  :: r < N && done[r] -> r++
  :: r < N && !done[r] -> goto give_up
  :: r == N -> break
  od;
  returned[me] = true;
  goto end;
give_up:
#ifndef WAIT_FIRST
  poisoned[me] = true;
#endif
  r = 0;
#ifndef NO_WAIT
  do
  :: r < N && (r == me || !touching[r]) -> r++
  :: r == N -> break
  od;
#endif
  poisoned[me] = true;
  returned[me] = true;
end:
  skip
}

init {
  byte i = 0;
  atomic {
    do
    :: i < N -> run rank(i); i++
    :: i == N -> break
    od
  }
}
