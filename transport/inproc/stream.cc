// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/transport/inproc/faults.h>
#include <weft/transport/inproc/pipe.h>
#include <weft/transport/inproc/regions.h>

namespace weft::transport::inproc {

namespace {

// One end: writes to one pipe and reads from the other.
class Stream final : public ByteStream, private PlacedWrites {
 public:
  struct Side {
    std::shared_ptr<Pipe> out;
    std::shared_ptr<Regions> exposed;
    std::string name;
  };
  Stream(const Side& own, const Side& other)
      : out_(own.out),
        in_(other.out),
        exposed_(own.exposed),
        of_peer_(other.exposed),
        own_name_(own.name),
        peer_(other.name) {}
  ~Stream() override {
    stop();
    out_->finish(gone());
    in_->stop_reading(gone());
  }

  std::string peer() const override { return peer_; }
  void start(EventLoop& loop, std::function<void()> readable,
             std::function<void()> writable) override {
    readable_.emplace(loop, std::move(readable));
    writable_.emplace(loop, std::move(writable));
    in_->on_bytes(readable_);
    out_->on_room(writable_);
  }
  void stop() noexcept override {
    in_->on_bytes(std::nullopt);
    out_->on_room(std::nullopt);
    if (readable_) readable_->stop();
    if (writable_) writable_->stop();
  }

  std::size_t write(std::span<const Bytes> pieces) noexcept override { return out_->write(pieces); }
  Bytes peek(std::size_t wanted) noexcept override { return in_->peek(wanted); }
  void consume(std::size_t bytes) noexcept override { in_->consume(bytes); }
  std::size_t read(std::span<std::byte> to) noexcept override { return in_->read(to); }
  std::size_t window() const override { return in_->window(); }
  std::optional<Error> end() const noexcept override { return in_->end(); }
  std::optional<Error> write_end() const noexcept override { return out_->deaf(); }
  void finish_writing() noexcept override { out_->finish(gone()); }
  PlacedWrites* placed_writes() override { return this; }

 private:
  Result<std::shared_ptr<MemoryRegion>> expose(const Slice& memory) override {
    return exposed_->add(memory);
  }
  Result<bool> put(const RegionKey& to, std::uint64_t offset, Bytes piece) noexcept override {
    if (of_peer_->write(to, offset, piece)) return true;
    // As with a device, both ends lose the connection.
    const Error why(Blame::PeerLost,
                    "a put to memory that " + peer_ + " does not expose (any more)");
    out_->finish(why);
    in_->cut_at(0, why);
    return false;
  }
  Error gone() const { return {Blame::PeerLost, own_name_ + " has ended the stream"}; }

  const std::shared_ptr<Pipe> out_;
  const std::shared_ptr<Pipe> in_;
  const std::shared_ptr<Regions> exposed_;
  const std::shared_ptr<Regions> of_peer_;
  const std::string own_name_;
  const std::string peer_;
  std::optional<Notice> readable_;
  std::optional<Notice> writable_;
};

}  // namespace

Streams make_streams(std::size_t ring_bytes, const std::string& name_of_a,
                     const std::string& name_of_b) {
  const Stream::Side a{std::make_shared<Pipe>(ring_bytes), std::make_shared<Regions>(), name_of_a};
  const Stream::Side b{std::make_shared<Pipe>(ring_bytes), std::make_shared<Regions>(), name_of_b};
  return {std::make_unique<Stream>(a, b), std::make_unique<Stream>(b, a), Faults(a.out),
          Faults(b.out)};
}

Capabilities capabilities() {
  Capabilities result;
  result.inline_bytes = kRingBytes / 8;
  result.one_sided = true;
  return result;
}

}  // namespace weft::transport::inproc
