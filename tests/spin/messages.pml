/* Messages between two ranks that both send first: no deadlock, however few slots the lanes have, and each message arrives.

   | here               | code                                                                                  |
   |--------------------|---------------------------------------------------------------------------------------|
   | lane[r]            | the lane on which rank r sends (lane.pml proves it), as a channel of SLOTS frames     |
   | EAGER ... DATA     | FrameKind (csrc/engine/message_queue.cpp)                                             |
   | proctype rank      | a thread in Communicator::wait: MessageQueue::progress, then a sleep until one of     |
   |                    | MessageQueue::watch is ready                                                          |
   | clearances,        | PeerState::clearances, cleared; unexpected: MessageQueue::unexpected_; posted: the    |
   | cleared, ...       | number of receives in posted_                                                         |

   Each rank submits MESSAGES sends, each short (EAGER) or long (ANNOUNCE, CLEAR, then FRAMES times DATA), in any mix; after
   that it submits as many receives, one by one and at any time. All have the same tag.

   Sizes: MESSAGES, FRAMES, SLOTS.

   Broken variants, each of which must deadlock:
     WRITE_BLOCKS        a rank that finds its lane full waits for room, and does not read meanwhile
     WATCH_OUTPUT_ONLY   a rank that has something to write looks out for room only
     WATCH_RECEIVES_ONLY a rank looks at its in-lane only when a receive wants something
     CLEAR_IS_LOST       an announcement that came before its receive is not cleared */

#ifndef MESSAGES
#define MESSAGES 2
#endif
#ifndef FRAMES
#define FRAMES 2
#endif
#ifndef SLOTS
#define SLOTS 1
#endif

mtype = { EAGER, ANNOUNCE, CLEAR, DATA };
chan lane[2] = [SLOTS] of { mtype, byte };

#define HAS_OUTPUT (sent < MESSAGES || len(clearances) > 0 || len(cleared) > 0)
#define EXPECTS_INPUT (announced > 0 || receiving > 0)
#define READABLE (len(lane[1 - me]) > 0)
#define WRITABLE (len(lane[me]) < SLOTS)
#define FINISHED (ended_sends == MESSAGES && ended_receives == MESSAGES)

#if defined(WATCH_OUTPUT_ONLY)
#define WATCH_INPUT (!HAS_OUTPUT && (posted > 0 || EXPECTS_INPUT))
#elif defined(WATCH_RECEIVES_ONLY)
#define WATCH_INPUT (posted > 0 || receiving > 0)
#else
#define WATCH_INPUT (posted > 0 || EXPECTS_INPUT || HAS_OUTPUT)
#endif

/* MessageQueue::deliver: a receive has got this message. */
inline deliver() {
  if
  :: kind == EAGER -> ended_receives++
  :: kind == ANNOUNCE -> receiving++; clearances!id
  fi
}

/* One pass of MessageQueue::read_frames. */
inline read_frame() {
  d_step { lane[1 - me]?kind, id };
  if
  :: (kind == EAGER || kind == ANNOUNCE) && posted > 0 -> posted--; deliver()
  :: (kind == EAGER || kind == ANNOUNCE) && posted == 0 -> unexpected!kind, id
  :: kind == CLEAR -> announced--; left[id] = FRAMES; cleared!id
  :: kind == DATA ->
     got[id]++;
     assert(got[id] <= FRAMES);
     if
     :: got[id] == FRAMES -> receiving--; ended_receives++
     :: got[id] < FRAMES
     fi
  fi
}

/* MessageQueue::write_frame: clearances first, then what is new, then data of the long messages in turn. */
inline write_frame() {
  if
  :: len(clearances) > 0 -> clearances?id; lane[me]!CLEAR, id
  :: len(clearances) == 0 && sent < MESSAGES ->
     id = sent;
     sent++;
     if
     :: lane[me]!EAGER, id -> ended_sends++
     :: lane[me]!ANNOUNCE, id -> announced++
     fi
  :: len(clearances) == 0 && sent == MESSAGES ->
     cleared?id;
     lane[me]!DATA, id;
     left[id]--;
     if
     :: left[id] == 0 -> ended_sends++
     :: left[id] > 0 -> cleared!id
     fi
  fi
}

proctype rank(byte me) {
  chan clearances = [MESSAGES] of { byte };
  chan cleared = [MESSAGES] of { byte };
  chan unexpected = [MESSAGES] of { mtype, byte };
  byte left[MESSAGES], got[MESSAGES];
  byte sent, announced, receiving, posted, submitted, ended_sends, ended_receives, id;
  mtype kind;
  do
  :: atomic { FINISHED -> break }
  :: atomic {                                         /* the program submits a receive */
       !FINISHED && submitted < MESSAGES ->
       submitted++;
       if
       :: len(unexpected) > 0 ->
          unexpected?kind, id;
#ifdef CLEAR_IS_LOST
          if
          :: kind == EAGER -> deliver()
          :: kind == ANNOUNCE -> receiving++
          fi
#else
          deliver()
#endif
       :: len(unexpected) == 0 -> posted++
       fi;
       id = 0
     }
  :: atomic { !FINISHED && WATCH_INPUT && READABLE -> read_frame(); id = 0 }
#ifdef WRITE_BLOCKS
  :: atomic { !FINISHED && HAS_OUTPUT -> write_frame(); id = 0 }
#else
  :: atomic { !FINISHED && HAS_OUTPUT && WRITABLE -> write_frame(); id = 0 }
#endif
  od;
  assert(len(unexpected) == 0 && len(clearances) == 0 && posted == 0)
}

init {
  atomic {
    run rank(0);
    run rank(1)
  }
}
