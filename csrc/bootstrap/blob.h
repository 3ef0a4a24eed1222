// Writing and reading the fields of a blob. Reading checks lengths: a blob comes from another process.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "bootstrap/exchange.h"

namespace pycoll {

class BlobWriter {
 public:
  template <class T>
  BlobWriter& put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    blob_.insert(blob_.end(), bytes, bytes + sizeof(T));
    return *this;
  }
  BlobWriter& put_text(const std::string& text) {
    put(static_cast<uint32_t>(text.size()));
    blob_.insert(blob_.end(), text.begin(), text.end());
    return *this;
  }
  Blob take() { return std::move(blob_); }

 private:
  Blob blob_;
};

class BlobReader {
 public:
  BlobReader(const Blob& blob, int rank) : blob_(blob), rank_(rank) {}

  template <class T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, bytes(sizeof(T)), sizeof(T));
    return value;
  }
  std::string get_text() {
    const uint32_t length = get<uint32_t>();
    const auto* text = reinterpret_cast<const char*>(bytes(length));
    return std::string(text, length);
  }

 private:
  const uint8_t* bytes(size_t n) {
    if (n > blob_.size() - at_) {
      fail(ErrorKind::kMismatch, "what rank ", rank_, " sent while making the group is cut short (",
           blob_.size(), " bytes); does every rank run the same version of pycoll?");
    }
    const uint8_t* at = blob_.data() + at_;
    at_ += n;
    return at;
  }
  const Blob& blob_;
  const int rank_;
  size_t at_ = 0;
};

}  // namespace pycoll
