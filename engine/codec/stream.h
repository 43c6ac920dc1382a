// SPDX-License-Identifier: Apache-2.0
// One message while it is written or read: the msgpack body, and the payloads that travel beside
// it. msgpack's adaptors take no context, so each thread knows the stream that it is writing or
// reading.
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

// The most containers (vectors, maps, structs, …) in one another. Messages from a peer are decoded
// by recursion.
constexpr std::size_t kDeepest = 64;

struct Encoded {
  Buffer body;
  std::vector<Part> parts;
  std::shared_ptr<SentBytes> watched;  // set if TensorWriter::watch() was called
};

class WEFT_API Writer {
 public:
  // `references` takes the references in the message; null where the message has no receiver, and
  // so no references.
  explicit Writer(ReferenceWriter* references = nullptr)
      : tensors_(encoded_.body), references_(references) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  // Runs `pack`, which packs values. Throws Caller for a value that cannot travel, and for more
  // than kDeepest containers in one another.
  Encoded write(const std::function<void(Packer&)>& pack);

  // The writer at work on this thread. Throws Caller if there is none: a tensor or an RRef was
  // packed outside of a call.
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
  // Parses the body and runs `convert` on it. Throws Caller for bytes of another type than
  // `convert` expects, and for bytes after the value.
  void read(std::span<const std::byte> body,
            const std::function<void(const msgpack::object&)>& convert);

  static Reader& current();
  TensorReader& tensors() { return tensors_; }
  ReferenceReader* references() const { return references_; }

 private:
  TensorReader tensors_;
  ReferenceReader* references_ = nullptr;
};

// The form of a message outside of calls (weft::encode): all in one run of bytes. See docs/wire.md.
WEFT_API std::vector<std::byte> join(const Encoded& message);
struct Split {
  std::span<const std::byte> body;
  std::vector<Part> parts;
};
// Throws Caller for bytes that are truncated or not made by join().
WEFT_API Split split(std::span<const std::byte> bytes);

}  // namespace weft::codec
