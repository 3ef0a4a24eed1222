// The operations of one group on this rank's device. docs/cuda_path.md has the contract.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/collectives.h"
#include "device/device.h"
#include "device/mapped.h"
#include "device/workspace.h"
#include "engine/communicator.h"

namespace pycoll::device {

struct GroupOptions {
  std::string algorithm;  // empty: what the environment says
  std::string rows;       // measured, for parse_rows()
  // Called by a thread of the host that waits for the device; throws to give up.
  InterruptCheck interrupt;
};

// Memory of `nbytes` zeros on every rank of the group, where ranks are several processes. Collective.
using SharePeerMemory = std::function<PeerMemory(size_t nbytes)>;

class DeviceGroup {
 public:
  // Collective over the ranks of the communicator. Not while a stream is captured.
  static std::shared_ptr<DeviceGroup> create(std::shared_ptr<Device> device,
                                             std::shared_ptr<Communicator> communicator,
                                             const GroupOptions& options,
                                             const SharePeerMemory& share);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  // What has been put into a stream: complete when the event has passed.
  struct Launched {
    std::shared_ptr<Event> event;
    Stream stream;
    uint64_t capture;  // in which graph
    uint64_t sequence;
    bool is_aside;  // in a stream of the group's own
  };

  // Puts requests into the current stream, or, `aside`, into one of the group's own, behind what is in the current one now.
  // Raises kInvalidArgument before anything moves, and what has failed before.
  Launched run(const std::vector<Request>& requests, bool aside, std::chrono::milliseconds timeout);
  // A message, in the stream of its peer and direction. `before` and `after` as in a Request.
  struct MessageRequest {
    Message message;
    DType dtype;
    int tag;
    std::function<void()> before, after;
  };
  Launched run(const MessageRequest& request, std::chrono::milliseconds timeout);
  // Symmetric memory, of `nbytes` on each rank. Operations on tensors in it copy nothing: then those of all ranks lie in it, at the
  // same place, or none of them. All ranks add the same, in the same order.
  void add_window(PeerMemory memory, size_t nbytes);
  // In place of a collective whose arguments were refused: the others find a mismatch instead of waiting. The group is unusable.
  void refuse(const std::string& reason);

  // What the current stream is given from now on begins after it. Raises kInvalidArgument in a capture that it is no part of.
  void join(const Launched& launched);
  // What `stream` is given from now on begins after it.
  void order(const Stream& stream, const Launched& launched);
  // Keeps what an operation in a stream of the group's own uses: until it has ended, or, in a capture, the capture has.
  void keep(const Launched& launched, std::shared_ptr<void> used);
  bool has_ended(const Launched& launched);
  // Until it has ended or (false) `patience` is over. Raises what went wrong.
  bool synchronise(const Launched& launched, Deadline patience);

  // What made the group unusable, on this rank or another; empty: nothing.
  std::string failure();
  void check_usable();
  // Looks after kernels that wait: reports what they found, and ends them when the group has failed elsewhere. Called now and
  // then by a thread of its own.
  void watch();
  // Ends all kernels.
  void abort(const std::string& reason);
  // Gives what is in the streams `patience` to end, then ends it. Idempotent.
  void close(std::chrono::milliseconds patience);

  Device& device() { return *device_; }
  const Facts& facts() const { return facts_; }

 private:
  DeviceGroup(std::shared_ptr<Device> device, std::shared_ptr<Communicator> communicator,
              const GroupOptions& options);
  void agree();
  void make_workspace(const SharePeerMemory& share);
  Choice choose(const Request& request, std::optional<MappedTensor>* mapped) const;
  // Puts one request into `stream`. The mutex is held.
  void launch(const Request& request, const Stream& stream, std::chrono::milliseconds timeout);
  void drop_kept();
  Launched finish(const Stream& stream, uint64_t sequence, bool is_aside);
  void note(const Request& request, const Choice& choice, uint64_t sequence,
            std::chrono::milliseconds timeout);
  Stream& own_stream(int index);
  std::string text_of_record();
  std::string trouble_with_peers();
  bool has_pending();
  void end_kernels();

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Communicator> communicator_;
  const InterruptCheck interrupt_;
  Facts facts_;
  bool all_in_one_process_ = true;
  std::unique_ptr<Workspace> workspace_;
  Windows windows_;

  std::mutex mutex_;  // of what follows: calls come from one thread, watch() and waits from others
  std::map<int, Stream> streams_;  // -1: of collectives; 2 peer and 2 peer + 1: messages
  std::map<int, Launched> last_;  // by the same numbers: kernels that must not overtake one another
  std::vector<std::pair<Launched, std::shared_ptr<void>>> kept_;
  uint64_t sequence_ = 0;
  std::string failure_, refusal_;
  std::optional<Deadline> left_since_;  // of watch()
  std::atomic<bool> failed_{false};
  std::atomic<bool> kernels_ended_{false};
  bool closed_ = false;
  std::chrono::milliseconds timeout_{0};  // of the last operation, for the text of an error
};

}  // namespace pycoll::device
