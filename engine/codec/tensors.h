// SPDX-License-Identifier: Apache-2.0
// Tensors of one message: their descriptions go into the msgpack body, and their storages travel
// beside it. Of a storage only the ranges that some tensor uses are sent, each once: ranges that
// overlap or touch as one part, others apart. So shared storage stays shared, and views stay views.
// docs/wire.md describes the bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <weft/base/export.h>
#include <weft/engine/codec/msgpack.h>

namespace weft::codec {

class SentBytes;

// A message with more tensors than this is refused: connections take 4096 payloads, one of which
// may be the rest of the message.
constexpr std::size_t kMaxStorages = 4095;
// Ranges of one storage travel apart up to this many parts of a message, which connections of every
// kind take. Beyond that, the smallest gaps between ranges are sent too.
constexpr std::size_t kMaxApart = 256;

// A used part of one storage, at the sender or at the receiver.
struct Part {
  // Bytes before the part in the sender's storage; a multiple of kPartAlignment.
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  c10::Storage storage;      // keeps it alive
  std::uint64_t offset = 0;  // of the part in `storage`, in bytes

  std::byte* data() const {
    return static_cast<std::byte*>(const_cast<void*>(storage.data())) + offset;
  }
  c10::Device device() const { return storage.device(); }
};
constexpr std::uint64_t kPartAlignment = 16;  // bytes of the largest element

class WEFT_API TensorWriter {
 public:
  // `body` is the buffer that the packer writes to.
  explicit TensorWriter(Buffer& body) : body_(body) {}
  // Throws Caller, naming the tensor, for one that cannot travel (quantised, meta, …).
  void pack(Packer& packer, const at::Tensor& tensor);
  // Returns the parts, once all tensors are packed, and writes their numbers into the body. Memory
  // that libtorch does not own (from_blob without a deleter) is copied, since its owner may free it
  // before it has been sent.
  std::vector<Part> take_parts();

  // From now on, numbers tensors that require grad in the order in which they are packed. The
  // numbers are the gradients' slots.
  void record_gradients() { recording_ = true; }
  // From now on, while nothing is recorded, tells tensors that require grad because they were
  // computed from others (`is_computed`) from leaves such as parameters: their gradients end at the
  // receiver.
  void tell_computed(bool (*is_computed)(const at::Tensor& tensor)) { is_computed_ = is_computed; }
  // From now on, notes the tensors that are packed, to compare them when they have been sent.
  // take_parts() notes their bytes.
  void watch();
  std::shared_ptr<SentBytes> take_watched() { return std::exchange(watched_, nullptr); }
  // The recorded tensors, by slot.
  std::vector<at::Tensor> take_recorded() { return std::exchange(recorded_, {}); }

 private:
  void pack_requires_grad(Packer& packer, const at::Tensor& tensor);
  void pack_dense(Packer& packer, const at::Tensor& tensor);
  void pack_storage(Packer& packer, const c10::Storage& storage, std::uint64_t begin,
                    std::uint64_t end);

  // The bytes of a storage that one tensor uses. begin and end are both 0 for a tensor without
  // elements, which needs any part, for the device.
  struct Use {
    std::size_t storage = 0;  // in storages_
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    // The position in the body of the number of its part.
    std::size_t place = 0;
    std::size_t range = 0;  // index in ranges()
  };
  // Bytes of a storage that travel as one part.
  struct Range {
    std::size_t storage = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t number = 0;  // of the part; 0: not yet numbered
  };
  std::vector<Range> ranges();
  void join_nearest(std::vector<Range>& ranges);
  Part part_over(const Range& range) const;

  Buffer& body_;
  std::vector<c10::Storage> storages_;
  std::vector<Use> uses_;
  bool recording_ = false;
  bool (*is_computed_)(const at::Tensor& tensor) = nullptr;
  std::vector<at::Tensor> recorded_;
  std::shared_ptr<SentBytes> watched_;
};

// Gives a received tensor its place in the autograd graph; `slot` is the sender's.
using AttachGradient = std::function<void(const at::Tensor& tensor, std::size_t slot)>;

// Rebuilds tensors over received parts, each of which begins its storage (offset 0).
class WEFT_API TensorReader {
 public:
  explicit TensorReader(std::vector<Part> parts) : parts_(std::move(parts)) {}
  // Throws Caller for a malformed description or one that does not fit its part: peers are not
  // trusted.
  at::Tensor unpack(const msgpack::object& object) const;
  // `attach` is called for tensors that the sender recorded; without it they are leaves that
  // require grad.
  void attach_gradients(AttachGradient attach) { attach_ = std::move(attach); }
  // `tell` is called for leaves that the sender has computed from others that require grad
  // (tell_computed()).
  void on_computed(std::function<void(const at::Tensor&)> tell) { on_computed_ = std::move(tell); }

 private:
  at::Tensor unpack_dense(const msgpack::object_array& fields) const;
  std::vector<Part> parts_;
  AttachGradient attach_;
  std::function<void(const at::Tensor&)> on_computed_;
};

}  // namespace weft::codec
