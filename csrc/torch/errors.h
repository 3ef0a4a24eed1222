// Errors of the core as the exceptions that torch turns into Python's: ValueError for arguments, DistBackendError for the rest.
#pragma once

#include <exception>

#include <c10/util/Exception.h>

#include "base/error.h"

namespace pycoll::torch_adapter {

[[noreturn]] inline void throw_as_torch(const Error& error) {
  const c10::SourceLocation where{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (error.kind() == ErrorKind::kInvalidArgument) throw c10::ValueError(where, error.what());
  throw c10::DistBackendError(where, error.what());
}

// What `error` holds, translated; exceptions that are not the core's pass unchanged.
inline std::exception_ptr as_torch(const std::exception_ptr& error) {
  if (error == nullptr) return nullptr;
  try {
    try {
      std::rethrow_exception(error);
    } catch (const Error& core) {
      throw_as_torch(core);
    }
  } catch (...) {
    return std::current_exception();
  }
}

template <class Fn>
auto translated(const Fn& fn) {
  try {
    return fn();
  } catch (const Error& error) {
    throw_as_torch(error);
  }
}

}  // namespace pycoll::torch_adapter
