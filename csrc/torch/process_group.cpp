#include "torch/process_group.h"

#include <ATen/record_function.h>

#include "torch/compat.h"
#include "torch/errors.h"
#include "torch/profiler.h"
#include "torch/requests.h"
#include "torch/runtime.h"
#include "torch/shared_memory.h"
#include "torch/sparse.h"
#include "torch/store_adapter.h"

namespace pycoll::torch_adapter {
namespace {

constexpr std::chrono::milliseconds kShutdownPatience{1000};

// Distinct groups can have the same store and prefix, when ranks make disjoint groups at the same time: their members tell
// them apart.
std::string store_prefix(const std::vector<uint64_t>& global_ranks) {
  std::string prefix = "pycoll";
  for (uint64_t rank : global_ranks) prefix += concat("/", rank);
  return prefix;
}

// Input tensors for a profiler, if there is one.
template <class Get>
Tensors profiled(const Get& get) {
  return at::hasCallbacks() ? get() : Tensors{};
}

Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

template <class T>
T& only_list(std::vector<T>& lists, const char* argument) {
  PYCOLL_CHECK_ARG(lists.size() == 1, argument, " has ", lists.size(),
                   " lists of tensors; pass one");
  return lists[0];
}

Tensors slice(const Tensors& tensors, Range range) {
  const auto begin = tensors.begin() + static_cast<ptrdiff_t>(range.begin);
  return Tensors(begin, begin + static_cast<ptrdiff_t>(range.numel));
}

c10::Device device_of(const Tensors& tensors) {
  return tensors.empty() || !tensors[0].defined() ? c10::Device(c10::kCPU) : tensors[0].device();
}

// One request for each run of tensors of the same dtype in `leading`.
template <class Make>
std::vector<Request> for_runs(const Tensors& leading, const Make& make) {
  std::vector<Request> requests;
  for (const Range& run : runs_of_equal_dtype(leading)) requests.push_back(make(run));
  return requests;
}

}  // namespace

ProcessGroupPycoll::ProcessGroupPycoll(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size, c10::intrusive_ptr<PycollOptions> options,
                                       Interpreter interpreter)
    : Backend(rank, size),
      options_(std::move(options)),
      interpreter_(std::move(interpreter)),
      store_(store) {
  init();
  StoreAdapter adapter(store);
  StoreExchange exchange(&adapter, store_prefix(options_->global_ranks_in_group), rank, size);
  CommunicatorOptions communicator_options;
  communicator_options.algorithm = options_->algorithm;
  communicator_options.tuning = options_->tuning;
  communicator_options.timeout = options_->timeout;
  communicator_options.interrupt = interpreter_.check_signals;
  communicator_options.before_leaving_wait = interpreter_.before_leaving_wait;
  communicator_options.on_failure = interpreter_.on_failure;
  communicator_ = translated(
      [&] { return Communicator::create(&exchange, process_runtime, communicator_options); });
  remember(communicator_);
}

ProcessGroupPycoll::~ProcessGroupPycoll() {
  if (communicator_->forked()) {
    // Destroying it would wait for threads that only the parent has.
    new std::shared_ptr<Communicator>(std::move(communicator_));
    return;
  }
  // The last reference may be Python's, dropped with its lock held, which a callback of the engine's thread may need.
  interpreter_.without_lock([this] { shutdown(); });
}

void ProcessGroupPycoll::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  communicator_->set_timeout(timeout);
}

c10d::ErrorType ProcessGroupPycoll::getError() {
  if (const auto group = device_path_.last(); group != nullptr) group->watch();
  return communicator_->failure().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupPycoll::abort() {
  device_path_.abort(concat("rank ", getRank(), " aborted the group"));
  communicator_->abort(concat("rank ", getRank(), " aborted the group"));
  communicator_->close(std::chrono::milliseconds(0));
}

void ProcessGroupPycoll::shutdown() {
  device_path_.close(kShutdownPatience);
  communicator_->close(kShutdownPatience);
}

at::Tensor ProcessGroupPycoll::allocateTensor(long numel, at::TensorOptions options) {
  TORCH_CHECK_VALUE(options.device().is_cpu() && numel >= 0, "pycoll: allocate_tensor makes CPU ",
                    "tensors of 0 elements or more, not ", numel, " on ", options.device());
  return shared_empty({numel}, c10::typeMetaToScalarType(options.dtype()));
}

std::chrono::milliseconds ProcessGroupPycoll::effective(std::chrono::milliseconds timeout) const {
  return timeout.count() < 0 ? communicator_->timeout() : timeout;
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::launched(c10::intrusive_ptr<PycollWork> work) {
  work->started();
  if (!work->finished()) in_flight_->add(work);
  if (coalesced_.has_value()) coalesced_->push_back(work);
  return work;
}

void ProcessGroupPycoll::startCoalescing() {
  coalesced_.emplace();
  device_coalesced_.emplace();
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::endCoalescing() {
  if (const WorkPtr on_device = end_device_coalescing()) {
    // What ran on the CPU beside it is over when this returns.
    for (const auto& part : *coalesced_) part->wait();
    coalesced_.reset();
    return on_device;
  }
  auto work = c10::make_intrusive<PycollWork>(communicator_, in_flight_, c10d::OpType::COALESCED,
                                              nullptr, Tensors{}, Tensors{});
  if (coalesced_.has_value()) {
    for (const auto& part : *coalesced_) work->include(*part);
  }
  coalesced_.reset();
  return work;
}

// One request or several, as `build` makes them; if it cannot, the other ranks hear of it.
template <class Build>
auto ProcessGroupPycoll::built(Collective collective, TensorSet* set, const Build& build) {
  try {
    return build(set);
  } catch (const std::exception& error) {  // also for want of memory for a contiguous copy
    communicator_->refuse(collective, error.what());
    throw;
  }
}

template <class Build>
ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::launch(const Call& call, Tensors outputs,
                                                       const Build& build) {
  if (runs_on_device(call.device)) {
    return launch_on_device(call, std::move(outputs), [&](TensorSet* set) {
      auto requests = build(set);
      const std::span<Request> each = all(requests);
      return std::vector<Request>(std::move_iterator(each.begin()), std::move_iterator(each.end()));
    });
  }
  auto work = c10::make_intrusive<PycollWork>(communicator_, in_flight_, call.type,
                                              profiler_title(call.type), call.inputs, outputs);
  translated([&] {
    const std::chrono::milliseconds timeout = effective(call.timeout);
    auto requests = built(call.collective, &work->tensors(), build);
    prepare(&work->tensors(), all(requests));
    for (Request& request : all(requests)) {
      if (call.async) {
        work->add(communicator_->start(std::move(request), timeout));
      } else {
        communicator_->run(std::move(request), timeout);
      }
    }
  });
  return launched(std::move(work));
}

// How much the ranks have to exchange shows on the way, so this one blocks, and returns a work that is complete.
ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::all_reduce_sparse_now(
    Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr c10d::OpType kType = c10d::OpType::_ALLREDUCE_SPARSE;
  auto work = c10::make_intrusive<PycollWork>(communicator_, in_flight_, kType,
                                              profiler_title(kType), tensors, tensors);
  translated([&] {
    try {
      all_reduce_sparse(communicator_.get(), tensors[0], opts.reduceOp, effective(opts.timeout));
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kInvalidArgument) {
        communicator_->refuse(Collective::kAllGather, error.what());
      }
      throw;
    }
  });
  return launched(std::move(work));
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::allreduce(Tensors& tensors,
                                                          const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].layout() == at::kSparse) {
    return all_reduce_sparse_now(tensors, opts);
  }
  return launch({c10d::OpType::ALLREDUCE, Collective::kAllReduce, opts.timeout, opts.asyncOp,
                 device_of(tensors), profiled([&] { return tensors; })},
                tensors, [&](TensorSet* set) {
                  return all_reduce_request(set, only(tensors, "tensors"), opts.reduceOp);
                });
}

void ProcessGroupPycoll::all_reduce_now(at::Tensor& tensor, const c10d::ReduceOp& op) {
  const bool needs_work = tensor.layout() == at::kSparse || runs_on_device(tensor.device()) ||
                          coalesced_.has_value() ||
                          profiler_title(c10d::OpType::ALLREDUCE) != nullptr;
  if (needs_work) {
    Tensors tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    options.asyncOp = false;
    allreduce(tensors, options)->wait();
    return;
  }
  translated([&] {
    TensorSet set;
    Request request = built(Collective::kAllReduce, &set,
                            [&](TensorSet* own) { return all_reduce_request(own, tensor, op); });
    prepare(&set, all(request));
    communicator_->run(std::move(request), communicator_->timeout());
  });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return launch({c10d::OpType::ALLREDUCE_COALESCED, Collective::kAllReduce, opts.timeout,
                 opts.asyncOp, device_of(tensors), profiled([&] { return tensors; })},
                tensors, [&](TensorSet* set) {
                  return for_runs(tensors, [&](Range run) {
                    return all_reduce_coalesced_request(set, slice(tensors, run), opts.reduceOp);
                  });
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::broadcast(Tensors& tensors,
                                                          const c10d::BroadcastOptions& opts) {
  const bool is_root = opts.rootRank == getRank();
  return launch({c10d::OpType::BROADCAST, Collective::kBroadcast, opts.timeout, opts.asyncOp,
                 device_of(tensors), profiled([&] { return tensors; })},
                tensors, [&](TensorSet* set) {
                  return broadcast_request(set, only(tensors, "tensors"),
                                           static_cast<int>(opts.rootRank), is_root);
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::allgather(std::vector<Tensors>& outputs,
                                                          Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  return launch({c10d::OpType::ALLGATHER, Collective::kAllGather, opts.timeout, opts.asyncOp,
                 device_of(inputs), profiled([&] { return inputs; })},
                flatten(outputs), [&](TensorSet* set) {
                  return all_gather_request(set, only_list(outputs, "tensor_list"),
                                            only(inputs, "the input"), getRank(), getSize());
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return launch({c10d::OpType::_ALLGATHER_BASE, Collective::kAllGather, opts.timeout, opts.asyncOp,
                 input.device(), profiled([&] { return Tensors{input}; })},
                {output}, [&](TensorSet* set) {
                  return all_gather_base_request(set, {output}, {input}, getRank(), getSize());
                });
}

// c10d passes one list a rank, each with one tensor for every input.
ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return launch(
      {c10d::OpType::ALLGATHER_COALESCED, Collective::kAllGather, opts.timeout, opts.asyncOp,
       device_of(inputs), profiled([&] { return inputs; })},
      flatten(outputs), [&](TensorSet* set) {
        std::vector<Request> requests;
        for (size_t i = 0; i < inputs.size(); ++i) {
          Tensors column;
          for (const Tensors& list : outputs) {
            PYCOLL_CHECK_ARG(list.size() == inputs.size(), "a list of outputs has ", list.size(),
                             " tensors, but there are ", inputs.size(),
                             " inputs; pass one for each");
            column.push_back(list[i]);
          }
          requests.push_back(all_gather_request(set, column, inputs[i], getRank(), getSize()));
        }
        return requests;
      });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return launch({c10d::OpType::ALLGATHER_COALESCED, Collective::kAllGather, opts.timeout,
                 opts.asyncOp, device_of(inputs), profiled([&] { return inputs; })},
                outputs, [&](TensorSet* set) {
                  PYCOLL_CHECK_ARG(outputs.size() == inputs.size(), "there are ", outputs.size(),
                                   " output tensors and ", inputs.size(),
                                   " input tensors; pass equally many");
                  return for_runs(inputs, [&](Range run) {
                    return all_gather_base_request(set, slice(outputs, run), slice(inputs, run),
                                                   getRank(), getSize());
                  });
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
  return launch({c10d::OpType::REDUCE_SCATTER, Collective::kReduceScatter, opts.timeout,
                 opts.asyncOp, device_of(outputs), profiled([&] { return flatten(inputs); })},
                outputs, [&](TensorSet* set) {
                  return reduce_scatter_request(set, only(outputs, "the output"),
                                                only_list(inputs, "input_list"), opts.reduceOp,
                                                getRank(), getSize());
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  return launch({c10d::OpType::_REDUCE_SCATTER_BASE, Collective::kReduceScatter, opts.timeout,
                 opts.asyncOp, input.device(), profiled([&] { return Tensors{input}; })},
                {output}, [&](TensorSet* set) {
                  return reduce_scatter_base_request(set, {output}, {input}, opts.reduceOp,
                                                     getRank(), getSize());
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return launch({kReduceScatterCoalesced, Collective::kReduceScatter, opts.timeout, opts.asyncOp,
                 device_of(inputs), profiled([&] { return inputs; })},
                outputs, [&](TensorSet* set) {
                  PYCOLL_CHECK_ARG(outputs.size() == inputs.size(), "there are ", outputs.size(),
                                   " output tensors and ", inputs.size(),
                                   " input tensors; pass equally many");
                  return for_runs(outputs, [&](Range run) {
                    return reduce_scatter_base_request(set, slice(outputs, run), slice(inputs, run),
                                                       opts.reduceOp, getRank(), getSize());
                  });
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::reduce(Tensors& tensors,
                                                       const c10d::ReduceOptions& opts) {
  const bool is_root = opts.rootRank == getRank();
  return launch({c10d::OpType::REDUCE, Collective::kReduce, opts.timeout, opts.asyncOp,
                 device_of(tensors), profiled([&] { return tensors; })},
                is_root ? tensors : Tensors{}, [&](TensorSet* set) {
                  return reduce_request(set, only(tensors, "tensors"), opts.reduceOp,
                                        static_cast<int>(opts.rootRank), is_root);
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::gather(std::vector<Tensors>& outputs,
                                                       Tensors& inputs,
                                                       const c10d::GatherOptions& opts) {
  const bool is_root = opts.rootRank == getRank();
  return launch({c10d::OpType::GATHER, Collective::kGather, opts.timeout, opts.asyncOp,
                 device_of(inputs), profiled([&] { return inputs; })},
                flatten(outputs), [&](TensorSet* set) {
                  return gather_request(
                      set, outputs.empty() ? Tensors{} : only_list(outputs, "gather_list"),
                      only(inputs, "the input"), static_cast<int>(opts.rootRank), is_root,
                      getSize());
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::scatter(Tensors& outputs,
                                                        std::vector<Tensors>& inputs,
                                                        const c10d::ScatterOptions& opts) {
  const bool is_root = opts.rootRank == getRank();
  return launch({c10d::OpType::SCATTER, Collective::kScatter, opts.timeout, opts.asyncOp,
                 device_of(outputs), profiled([&] { return flatten(inputs); })},
                outputs, [&](TensorSet* set) {
                  return scatter_request(
                      set, only(outputs, "the output"),
                      inputs.empty() ? Tensors{} : only_list(inputs, "scatter_list"),
                      static_cast<int>(opts.rootRank), is_root, getSize());
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                              std::vector<int64_t>& output_splits,
                                                              std::vector<int64_t>& input_splits,
                                                              const c10d::AllToAllOptions& opts) {
  return launch({c10d::OpType::ALLTOALL_BASE, Collective::kAllToAll, opts.timeout, opts.asyncOp,
                 input.device(), profiled([&] { return Tensors{input}; })},
                {output}, [&](TensorSet* set) {
                  return all_to_all_single_request(set, output, input, output_splits, input_splits,
                                                   getSize());
                });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::alltoall(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllToAllOptions& opts) {
  return launch(
      {c10d::OpType::ALLTOALL, Collective::kAllToAll, opts.timeout, opts.asyncOp, device_of(inputs),
       profiled([&] { return inputs; })},
      outputs, [&](TensorSet* set) { return all_to_all_request(set, outputs, inputs, getSize()); });
}

void ProcessGroupPycoll::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  translated([&] { communicator_->monitored_barrier(effective(opts.timeout), wait_all_ranks); });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::barrier(const c10d::BarrierOptions& opts) {
  return launch({c10d::OpType::BARRIER,
                 Collective::kBarrier,
                 opts.timeout,
                 opts.asyncOp,
                 device_of_barrier(opts),
                 {}},
                {}, [](TensorSet*) { return std::vector<Request>(1); });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::send(Tensors& tensors, int dst, int tag) {
  if (runs_on_device(device_of(tensors)))
    return message_on_device(tensors, dst, tag, c10d::OpType::SEND);
  constexpr c10d::OpType kType = c10d::OpType::SEND;
  auto work = c10::make_intrusive<PycollWork>(communicator_, in_flight_, kType,
                                              profiler_title(kType), tensors, Tensors{});
  translated([&] {
    const at::Tensor& tensor = only(tensors, "tensors");
    check_tensor(tensor, "tensor", Role::kInput);
    const Elements elements = elements_of(tensor);
    const void* data = work->tensors().add(tensor, Role::kInput);
    work->tensors().fill_stand_ins();  // a message is what the tensor holds now
    work->add(communicator_->send(data, elements.numel * itemsize(elements.dtype), elements.dtype,
                                  dst, tag, communicator_->timeout()));
  });
  return launched(std::move(work));
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::receive(Tensors& tensors, int src, int tag,
                                                        c10d::OpType type) {
  if (runs_on_device(device_of(tensors))) return message_on_device(tensors, src, tag, type);
  auto work = c10::make_intrusive<PycollWork>(communicator_, in_flight_, type, profiler_title(type),
                                              tensors, tensors);
  translated([&] {
    const at::Tensor& tensor = only(tensors, "tensors");
    check_tensor(tensor, "tensor", Role::kOutput);
    const Elements elements = elements_of(tensor);
    void* data = work->tensors().add(tensor, Role::kOutput);
    std::function<void()> after;
    if (work->tensors().needs_copies()) after = [w = work.get()] { w->tensors().copy_back(); };
    work->tensors().bump_versions();
    work->add(communicator_->receive(data, elements.numel * itemsize(elements.dtype),
                                     elements.dtype, src, tag, communicator_->timeout(),
                                     std::move(after)));
  });
  return launched(std::move(work));
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::recv(Tensors& tensors, int src, int tag) {
  return receive(tensors, src, tag, c10d::OpType::RECV);
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, kAnySource, tag, c10d::OpType::RECVANYSOURCE);
}

// For on_wire.cpp.
template ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::launch(const Call&, Tensors,
                                                                const BuildRequests&);

}  // namespace pycoll::torch_adapter
