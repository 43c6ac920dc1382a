// One message while it is written or read: the msgpack body, and what travels beside it. msgpack's
// adaptors take no context, so the stream at work on a thread is found through that thread.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <weft/base/export.h>
#include <weft/engine/codec/msgpack.h>
#include <weft/engine/codec/tensors.h>

namespace weft::codec {

// The references to values elsewhere that a message carries. engine/rref packs and unpacks them;
// the stream only carries these along.
class ReferenceWriter {
 public:
  ReferenceWriter() = default;
  ReferenceWriter(const ReferenceWriter&) = delete;
  ReferenceWriter& operator=(const ReferenceWriter&) = delete;
  virtual ~ReferenceWriter() = default;
};
class ReferenceReader {
 public:
  ReferenceReader() = default;
  ReferenceReader(const ReferenceReader&) = delete;
  ReferenceReader& operator=(const ReferenceReader&) = delete;
  virtual ~ReferenceReader() = default;
};

// Containers (vectors, maps, structs, …) in one another: what comes from a peer is taken apart by
// recursion.
constexpr std::size_t kDeepest = 64;

struct Encoded {
  Buffer body;
  std::vector<Part> parts;
  std::shared_ptr<SentBytes> watched;  // where TensorWriter::watch() was called
};

class WEFT_API Writer {
 public:
  // `references` takes the references in the message; null where the message has no receiver, and
  // so no references.
  explicit Writer(ReferenceWriter* references = nullptr)
      : tensors_(encoded_.body), references_(references) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  // Runs the function, in which values are packed. Throws Caller for what cannot travel, and for
  // more than kDeepest containers in one another.
  Encoded write(const std::function<void(Packer&)>& pack);

  // The one at work on this thread. Throws Caller where none is: "pack() outside of weft".
  static Writer& current();
  TensorWriter& tensors() { return tensors_; }
  ReferenceWriter* references() const { return references_; }

 private:
  Encoded encoded_;
  TensorWriter tensors_;
  ReferenceWriter* references_ = nullptr;
};

class WEFT_API Reader {
 public:
  explicit Reader(std::vector<Part> parts, ReferenceReader* references = nullptr)
      : tensors_(std::move(parts)), references_(references) {}
  // Parses the body and runs the function on it. Throws Caller for bytes that are not what the
  // function takes them for, or that go on behind it.
  void read(std::span<const std::byte> body,
            const std::function<void(const msgpack::object&)>& convert);

  static Reader& current();
  TensorReader& tensors() { return tensors_; }
  ReferenceReader* references() const { return references_; }

 private:
  TensorReader tensors_;
  ReferenceReader* references_ = nullptr;
};

// The form of a message on its own (weft::encode): everything in one run of bytes. docs/wire.md.
WEFT_API std::vector<std::byte> join(const Encoded& message);
struct Split {
  std::span<const std::byte> body;
  std::vector<Part> parts;
};
// Throws Caller for short or foreign bytes.
WEFT_API Split split(std::span<const std::byte> bytes);

}  // namespace weft::codec
