// Tensors of one message: what describes them goes into the msgpack body, their storages travel
// beside it, and of those only what some tensor uses: each range once, ranges that overlap or touch
// as one, others apart. So what tensors share stays shared, and views stay views. docs/wire.md has
// the bytes.
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

// More tensors in one message than this are refused: connections take 4096 payloads, one of which
// may be the rest of it.
constexpr std::size_t kMaxStorages = 4095;
// Ranges of one storage travel apart up to so many parts of a message, which lanes of every kind
// take; beyond, the smallest gaps between them travel as well.
constexpr std::size_t kMaxApart = 256;

// A used part of one storage, on either side.
struct Part {
  std::uint64_t begin =
      0;  // bytes before the part in the sender's storage; a multiple of kPartAlignment
  std::uint64_t bytes = 0;
  c10::Storage storage;      // keeps it alive
  std::uint64_t offset = 0;  // of the part in `storage`

  std::byte* data() const {
    return static_cast<std::byte*>(const_cast<void*>(storage.data())) + offset;
  }
  c10::Device device() const { return storage.device(); }
};
constexpr std::uint64_t kPartAlignment = 16;  // the largest element

class WEFT_API TensorWriter {
 public:
  // `body` is what the packer writes to.
  explicit TensorWriter(Buffer& body) : body_(body) {}
  // Throws Caller for what cannot travel (quantised, meta, …), naming it.
  void pack(Packer& packer, const at::Tensor& tensor);
  // The parts, once all tensors are packed; their numbers are written into the body. What lies in
  // memory that libtorch does not own (from_blob without a deleter) is copied, for its owner may
  // free it before it has been sent.
  std::vector<Part> take_parts();

  // From now on tensors that require grad are numbered, in the order in which they are packed: the
  // gradients' slots.
  void record_gradients() { recording_ = true; }
  // From now on tensors that require grad because they were computed from others (`is_computed`)
  // are told apart from leaves such as parameters: their gradients end at the receiver. Where
  // nothing is recorded.
  void tell_computed(bool (*is_computed)(const at::Tensor& tensor)) { is_computed_ = is_computed; }
  // From now on what is packed is noted, to be compared when it has been sent; take_parts() notes
  // the rest.
  void watch();
  std::shared_ptr<SentBytes> take_watched() { return std::exchange(watched_, nullptr); }
  // The recorded ones, by slot.
  std::vector<at::Tensor> take_recorded() { return std::exchange(recorded_, {}); }

 private:
  void pack_requires_grad(Packer& packer, const at::Tensor& tensor);
  void pack_dense(Packer& packer, const at::Tensor& tensor);
  void pack_storage(Packer& packer, const c10::Storage& storage, std::uint64_t begin,
                    std::uint64_t end);

  // By one tensor; bytes of the storage. Both 0: it has no elements, and needs any part, for the
  // device.
  struct Use {
    std::size_t storage = 0;  // in storages_
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t place = 0;  // in the body, of the number of its part
    std::size_t range = 0;  // which of ranges()
  };
  // What travels as one part.
  struct Range {
    std::size_t storage = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t number = 0;  // of the part; 0: none yet
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

// Gives a tensor that has come its place in the graph; the slot is the sender's.
using AttachGradient = std::function<void(const at::Tensor& tensor, std::size_t slot)>;

// Rebuilds tensors over parts that have come; each begins its storage (offset 0).
class WEFT_API TensorReader {
 public:
  explicit TensorReader(std::vector<Part> parts) : parts_(std::move(parts)) {}
  // Throws Caller for a description that is none, or does not fit its part. Peers are not trusted.
  at::Tensor unpack(const msgpack::object& object) const;
  // Called for tensors that the sender recorded; without it they are leaves that require grad.
  void attach_gradients(AttachGradient attach) { attach_ = std::move(attach); }
  // Called for leaves whose sender has computed them from others that require grad
  // (tell_computed()).
  void on_computed(std::function<void(const at::Tensor&)> tell) { on_computed_ = std::move(tell); }

 private:
  at::Tensor unpack_dense(const msgpack::object_array& fields) const;
  std::vector<Part> parts_;
  AttachGradient attach_;
  std::function<void(const at::Tensor&)> on_computed_;
};

}  // namespace weft::codec
