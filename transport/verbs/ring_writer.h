// The sending half of a lane. Small pieces are copied into a ring of the peer's by RDMA writes that
// tell how many bytes are new. A large piece is not: the peer is told that it waits, answers with
// the place where it belongs, and it is written there from where it lies; so are pieces of a GPU's
// memory. Everything that is posted to the queue pair's send queue is posted here, within the
// grants that the peer has given. Usable from every thread.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include <weft/transport/verbs/mirror.h>
#include <weft/transport/verbs/queue_pair.h>

namespace weft::transport::verbs {

// Of each direction of a lane.
constexpr std::size_t kRingBytes = 256 << 10;
// Pieces from here on are written to their place: for smaller ones two copies cost less than
// registering memory twice.
constexpr std::size_t kDirectBytes = 128 << 10;

class RingWriter {
 public:
  // `peer` names the other end in messages. Throws Busy.
  RingWriter(QueuePair& pair, std::shared_ptr<RegistrationCache> registrations, std::string peer);

  const std::string& peer() const { return name_of_peer_; }

  // Only from now on anything goes out.
  void open(const Hello& peer);

  // As ByteStream::write(): after it took less than all, the next call begins with the same memory.
  std::size_t write(std::span<const Bytes> pieces) noexcept;
  // As PlacedWrites::put().
  Result<bool> put(std::uint64_t address, std::uint32_t key, Bytes piece) noexcept;
  // Behind what was written: nothing follows.
  void finish() noexcept;

  // The other half's words. They go out as soon as they can; a later Room replaces one that has
  // not.
  void tell(const Note& note) noexcept;

  // The oldest thing that was posted has been carried out.
  void sent() noexcept;
  // The peer's Room or Place, and the grants of any note. Return why that cannot be, in words.
  [[nodiscard]] const char* heard(const Note& note) noexcept;
  [[nodiscard]] const char* granted(std::uint32_t receives) noexcept;
  // Whether write() may take more than when it took less than all; asks for it once.
  bool take_room() noexcept;
  bool has_room() const noexcept;
  // The device took no more, which cannot be while it is well, or a GPU has failed.
  std::optional<Error> failure() const noexcept;
  // The other half's GPU has.
  void give_up(const Error& why) noexcept;
  // Whether something but a piece that goes to its place has been posted and not carried out.
  bool has_words_underway() const noexcept;
  // Whether a piece is being written to its place, which withdraw() ends.
  bool is_writing() const noexcept;
  // The pieces that write() did not take are not read any more; destroys the queue pair, and
  // returns true, where one is being written.
  bool withdraw() noexcept;
  // Destroys the queue pair, while nobody posts.
  void destroy() noexcept;

 private:
  enum class Phase { None, Waits, Writing, Written };
  enum class Posted { Ring, Place, LastOfPlace, Note };
  struct Sent {
    Posted what = Posted::Note;
    std::uint32_t bytes = 0;
  };
  // The piece that goes to its place.
  struct Direct {
    Phase phase = Phase::None;
    Bytes piece;
    std::shared_ptr<const Registration> registration;
    std::uint64_t wanted = 0;  // of the piece, by the peer
    std::uint64_t posted = 0;
    std::uint64_t address = 0;
    std::uint32_t key = 0;
    bool is_put = false;  // nobody is told when it is there
  };

  // All under the mutex.
  const char* take_grants(std::uint32_t receives);
  const char* take_place(const Note& note);
  bool may_post() const;
  std::size_t room() const;
  std::size_t take(Bytes piece);
  // To the staging memory, from the host's or a GPU's. False where the GPU has failed.
  bool copy_in(Bytes piece) noexcept;
  bool begin_direct(Bytes piece);
  void post_ring();
  void post_direct();
  void post_notes();
  bool post_note(const Note& note);
  bool posted(bool taken, Sent what);

  QueuePair& pair_;
  const std::shared_ptr<RegistrationCache> registrations_;
  const std::string name_of_peer_;
  Mirror staging_;
  const Registration staged_;

  mutable std::mutex mutex_;  // of what follows
  std::optional<Hello> peer_;
  std::optional<Error> failure_;
  bool wants_room_ = false;
  bool has_news_ = false;       // since write() took less than all
  std::uint64_t head_ = 0;      // bytes that were ever posted to the ring
  std::size_t unposted_ = 0;    // bytes behind those, in the staging memory
  std::uint64_t carried_ = 0;   // of them carried out
  std::uint64_t read_ = 0;      // and read by the peer
  std::uint32_t messages_ = 0;  // that took a receive of the peer's; counts around
  std::uint32_t granted_ = 0;   // receives that it has posted again
  std::uint32_t my_grants_ = 0;
  std::deque<Sent> outstanding_;
  Direct direct_;
  std::size_t through_ring_ = 0;  // bytes of a large piece that has no place
  bool withdrawn_ = false;
  bool has_copied_ = false;  // from a GPU, which is slow and said once
  std::optional<Note> room_note_;
  std::optional<Note> place_note_;
  bool finish_due_ = false;
};

}  // namespace weft::transport::verbs
