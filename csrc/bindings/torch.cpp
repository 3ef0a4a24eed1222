#include <unistd.h>

#include <atomic>
#include <thread>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "base/log.h"
#include "bindings/bindings.h"
#include "torch/call_tag.h"
#include "torch/device_path.h"
#include "torch/process_group.h"
#include "torch/runtime.h"

namespace pycoll::bindings {
namespace {

namespace py = pybind11;
using torch_adapter::ProcessGroupPycoll;
using torch_adapter::PycollOptions;
using BackendPtr = c10::intrusive_ptr<ProcessGroupPycoll>;

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

bool is_main_thread() { return getpid() == gettid(); }

[[noreturn]] void pause_for_ever() {
  while (true) pause();
}

// How long a thread that comes from a wait is held back once the interpreter has begun to end: longer than the interpreter takes
// from its exit handlers to the point where it ends threads, and no hang for a handler that joins the thread.
constexpr std::chrono::milliseconds kExitDelay{3000};

// Set when pycoll's own exit handler has run.
std::atomic<bool> exiting{false};

// A thread that asks for the interpreter's lock while the interpreter ends is unwound by it, through destructors that must not be
// unwound: the process would abort. Here it stops instead, as Python itself does from 3.14 on.
void before_leaving_wait() {
  if (!exiting.load() || is_main_thread()) return;
  const Deadline deadline = Deadline::after(kExitDelay);
  while (!deadline.passed()) {
    if (is_finalizing()) pause_for_ever();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Ctrl-C while a thread waits: Python's own handlers run, and what they raise ends the wait.
void check_python_signals() {
  if (!is_main_thread()) {
    // Signals are the main thread's. When that one has begun to end the interpreter, no other may ask for its lock again: the
    // interpreter would end the thread in the middle of what it does.
    if (is_finalizing()) pause_for_ever();
    return;
  }
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void without_python_lock(const std::function<void()>& fn) {
  std::optional<py::gil_scoped_release> release;
  if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
  fn();
}

// What Python wants to be called when an operation fails. Leaked: it may be asked for after the interpreter's end.
py::object& failure_hook() {
  static auto* const hook = new py::object(py::none());
  return *hook;
}

// Threads in the hook. The interpreter must not begin to end while it runs there: see before_leaving_wait.
std::atomic<int> in_failure_hook{0};

void call_failure_hook() {
  struct Counted {
    Counted() { in_failure_hook.fetch_add(1); }
    ~Counted() { in_failure_hook.fetch_sub(1); }
  } counted;
  if (exiting.load() || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (failure_hook().is_none()) return;
  try {
    failure_hook()();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("pycoll's failure hook");
  }
}

// "train.py:33": the innermost line outside torch and pycoll.
std::string call_site() {
  py::gil_scoped_acquire gil;
  return py::cast<std::string>(py::module_::import("pycoll.tags").attr("call_site")());
}

BackendPtr create(const c10d::DistributedBackendOptions& group, const std::string& algorithm,
                  const std::string& tuning, const std::string& device_tuning,
                  std::chrono::milliseconds timeout) {
  auto options = c10::make_intrusive<PycollOptions>(algorithm, tuning, device_tuning, timeout);
  options->group_name = group.group_id;
  options->global_ranks_in_group.assign(group.global_ranks_in_group.begin(),
                                        group.global_ranks_in_group.end());
  return c10::make_intrusive<ProcessGroupPycoll>(
      group.store, group.group_rank, group.group_size, std::move(options),
      torch_adapter::Interpreter{check_python_signals, before_leaving_wait, without_python_lock,
                                 call_site, call_failure_hook});
}

c10::intrusive_ptr<c10d::Work> on_wire(ProcessGroupPycoll& self, const std::string& collective,
                                       const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs,
                                       const c10d::ReduceOp& op, bool lists,
                                       at::ScalarType wire_dtype, int64_t block, bool async_op) {
  return self.on_wire({collective, op, lists, wire_dtype, block, async_op}, outputs, inputs);
}

py::dict to_dict(const Event& event) {
  return py::dict(
      py::arg("sequence") = event.sequence, py::arg("operation") = event.operation,
      py::arg("algorithm") = event.algorithm, py::arg("memory_path") = event.memory_path,
      py::arg("dtype") = name(event.dtype), py::arg("wire_dtype") = name(event.wire_dtype),
      py::arg("itemsize") = itemsize(event.dtype), py::arg("op") = name(event.op),
      py::arg("peer") = event.peer, py::arg("nbytes") = event.nbytes,
      py::arg("bytes_written") = event.bytes_written, py::arg("bytes_read") = event.bytes_read,
      py::arg("timeout_ms") = event.timeout_ms, py::arg("queued_ns") = event.queued_ns,
      py::arg("started_ns") = event.started_ns, py::arg("ended_ns") = event.ended_ns,
      py::arg("failed") = event.failed);
}

std::vector<py::dict> events(const ProcessGroupPycoll& backend) {
  std::vector<Event> events;
  {
    // Locks are taken that a thread may hold which waits for Python's.
    py::gil_scoped_release release;
    events = backend.communicator()->events();
  }
  std::vector<py::dict> dicts;
  for (const Event& event : events) dicts.push_back(to_dict(event));
  return dicts;
}

}  // namespace

void bind_torch(py::module_& module) {
  // Base classes, with their translators of exceptions, come from torch's own module.
  py::module_::import("torch._C._distributed_c10d");
  py::class_<PycollOptions, c10d::Backend::Options, c10::intrusive_ptr<PycollOptions>>(
      module, "BackendOptions")
      .def_readonly("algorithm", &PycollOptions::algorithm)
      .def_readonly("tuning", &PycollOptions::tuning)
      .def_readonly("device_tuning", &PycollOptions::device_tuning)
      .def("__copy__",
           [](const PycollOptions& self) { return c10::make_intrusive<PycollOptions>(self); })
      .def("__deepcopy__", [](const PycollOptions& self, const py::dict&) {
        return c10::make_intrusive<PycollOptions>(self);
      });
  py::class_<ProcessGroupPycoll, c10d::Backend, BackendPtr>(module, "ProcessGroupPycoll")
      .def_property_readonly(
          "algorithm",
          [](const ProcessGroupPycoll& self) { return self.communicator()->algorithm(); })
      .def_property_readonly(
          "failure", [](const ProcessGroupPycoll& self) { return self.communicator()->failure(); })
      .def_property_readonly(
          "options",
          [](ProcessGroupPycoll& self) {
            return c10::static_intrusive_pointer_cast<PycollOptions>(self.getBackendOptions());
          })
      .def("on_wire", &on_wire, py::arg("collective"), py::kw_only(), py::arg("outputs"),
           py::arg("inputs"), py::arg("op"), py::arg("lists"), py::arg("wire_dtype"),
           py::arg("block"), py::arg("async_op"), py::call_guard<py::gil_scoped_release>())
      .def_static("runs_on_device", &torch_adapter::runs_on_device, py::arg("device"))
      .def("register_symmetric", &ProcessGroupPycoll::register_symmetric, py::arg("tensor"),
           py::call_guard<py::gil_scoped_release>())
      .def("dead_ranks",
           [](const ProcessGroupPycoll& self) { return self.communicator()->dead_ranks(); })
      .def("events", &events);
  module.def("create", &create, py::arg("group"), py::arg("algorithm"), py::arg("tuning"),
             py::arg("device_tuning"), py::arg("timeout"),
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "set_log_level", [](const std::string& level) { set_log_level(parse_log_level(level)); },
      py::arg("level"));
  module.def(
      "set_failure_hook", [](py::object hook) { failure_hook() = std::move(hook); },
      py::arg("hook").none(true));
  module.def(
      "set_tag",
      [](const std::string& tag) { return std::exchange(torch_adapter::thread_tag(), tag); },
      py::arg("tag"));
  module.def(
      "set_cuda_library",
      [](uintptr_t launchers, uintptr_t driver) {
        torch_adapter::set_cuda_library({reinterpret_cast<const cuda::Launchers*>(launchers),
                                         reinterpret_cast<const cuda::DriverFunctions*>(driver)});
      },
      py::arg("launchers"), py::arg("driver"),
      "The addresses of the tables in libpycoll_cuda.so; tensors on CUDA devices need them.");
  module.def(
      "set_simulated_device",
      [](uintptr_t address) {
        return reinterpret_cast<uintptr_t>(
            torch_adapter::set_simulated_device(reinterpret_cast<device::Device*>(address)));
      },
      py::arg("address"),
      "For tests: CPU tensors of this thread's calls stand for those of the simulated device at "
      "the "
      "address, 0 for none; returns the one before.");
  module.def(
      "prepare_for_exit",
      [] {
        torch_adapter::stop_watching_devices();
        torch_adapter::prepare_for_exit();
        exiting.store(true);
        const Deadline deadline = Deadline::after(kExitDelay);
        while (in_failure_hook.load() > 0 && !deadline.passed())
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace pycoll::bindings
