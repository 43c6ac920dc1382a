#include <utility>

#include <weft/transport/inproc/faults.h>
#include <weft/transport/inproc/pipe.h>

namespace weft::transport::inproc {

namespace {

// One end: writes to one pipe and reads from the other.
class Stream final : public ByteStream {
 public:
  Stream(std::shared_ptr<Pipe> out, std::shared_ptr<Pipe> in, std::string own_name, std::string peer)
      : out_(std::move(out)), in_(std::move(in)), own_name_(std::move(own_name)), peer_(std::move(peer)) {}
  ~Stream() override {
    stop();
    out_->finish(gone());
    in_->stop_reading(gone());
  }

  std::string peer() const override { return peer_; }
  void start(EventLoop& loop, std::function<void()> readable, std::function<void()> writable) override {
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

 private:
  Error gone() const { return {Blame::PeerLost, own_name_ + " has ended the stream"}; }

  const std::shared_ptr<Pipe> out_;
  const std::shared_ptr<Pipe> in_;
  const std::string own_name_;
  const std::string peer_;
  std::optional<Notice> readable_;
  std::optional<Notice> writable_;
};

}  // namespace

Streams make_streams(std::size_t ring_bytes, const std::string& name_of_a, const std::string& name_of_b) {
  auto there = std::make_shared<Pipe>(ring_bytes);
  auto back = std::make_shared<Pipe>(ring_bytes);
  return {std::make_unique<Stream>(there, back, name_of_a, name_of_b),
          std::make_unique<Stream>(back, there, name_of_b, name_of_a), Faults(there), Faults(back)};
}

Capabilities capabilities() {
  Capabilities result;
  result.inline_bytes = kRingBytes / 8;
  return result;
}

}  // namespace weft::transport::inproc
