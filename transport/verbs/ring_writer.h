// SPDX-License-Identifier: Apache-2.0
// The sending half of a connection. RDMA writes copy small pieces into a ring in the peer's memory
// and tell how many bytes are new. A large piece, or one in GPU memory, is not copied: the writer
// tells the peer that the piece waits, the peer answers with its place, and an RDMA write moves it
// there directly. All work on the queue pair's send queue is posted here, within the peer's grants.
// Thread-safe.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <weft/base/mutex.h>
#include <weft/transport/verbs/mirror.h>
#include <weft/transport/verbs/queue_pair.h>

namespace weft::transport::verbs {

// Size of the ring for each direction of a connection.
constexpr std::size_t kRingBytes = 256 << 10;
// Pieces of at least this size are written to their place; for smaller ones two copies cost less
// than registering memory on both sides.
constexpr std::size_t kDirectBytes = 128 << 10;

class RingWriter {
 public:
  // `peer` names the other end in messages. Throws Busy.
  RingWriter(QueuePair& pair, std::shared_ptr<RegistrationCache> registrations, std::string peer);

  const std::string& peer() const { return name_of_peer_; }

  // Starts sending; before this call nothing is sent.
  void open(const Hello& peer);

  // See ByteStream::write(): if it took less than all, the next call must begin with the same
  // memory.
  std::size_t write(std::span<const Bytes> pieces) noexcept;
  // See PlacedWrites::put().
  Result<bool> put(std::uint64_t address, std::uint32_t key, Bytes piece) noexcept;
  // Tells the peer, after everything that was written, that no more bytes follow.
  void finish() noexcept;

  // Sends a note of the receiving half as soon as possible. A later Room replaces one that has not
  // been sent.
  void tell(const Note& note) noexcept;

  // Handles the completion of the oldest posted work.
  void sent() noexcept;
  // Handle the peer's Room or Place, and the grants of any other note. Return null, or a text that
  // says why the note is invalid.
  [[nodiscard]] const char* heard(const Note& note) noexcept;
  [[nodiscard]] const char* granted(std::uint32_t receives) noexcept;
  // True if write() took less than all and may take more now. take_room() returns true once for
  // each such change.
  bool take_room() noexcept;
  bool has_room() const noexcept;
  // Set if the device refused work, which a working device does not do, or if a GPU has failed.
  std::optional<Error> failure() const noexcept;
  // Reports that a GPU of the receiving half has failed.
  void give_up(const Error& why) noexcept;
  // True while ring writes or notes are posted and not completed; writes to a place do not count.
  bool has_words_underway() const noexcept;
  // True while a piece is being written to its place; withdraw() ends that.
  bool is_writing() const noexcept;
  // Ensures that pieces that write() did not take are not read any more. If one is being written,
  // destroys the queue pair and returns true.
  bool withdraw() noexcept;
  // Destroys the queue pair while no thread posts.
  void destroy() noexcept;

 private:
  enum class Phase { None, Waits, Writing, Written };
  enum class Posted { Ring, Place, LastOfPlace, Note };
  struct Sent {
    Posted what = Posted::Note;
    std::uint32_t bytes = 0;
  };
  // The piece that is to be written to its place.
  struct Direct {
    Phase phase = Phase::None;
    Bytes piece;
    std::shared_ptr<const Registration> registration;
    std::uint64_t wanted = 0;  // bytes of the piece that the peer accepts
    std::uint64_t posted = 0;
    std::uint64_t address = 0;
    std::uint32_t key = 0;
    bool is_put = false;  // a put(): the peer is not told when it has arrived
  };

  const char* take_grants(std::uint32_t receives) WEFT_REQUIRES(mutex_);
  const char* take_place(const Note& note) WEFT_REQUIRES(mutex_);
  bool may_post() const WEFT_REQUIRES(mutex_);
  std::size_t room() const WEFT_REQUIRES(mutex_);
  std::size_t take(Bytes piece) WEFT_REQUIRES(mutex_);
  // Copies host or GPU memory to the staging buffer. Returns false if the GPU has failed.
  bool copy_in(Bytes piece) noexcept WEFT_REQUIRES(mutex_);
  bool begin_direct(Bytes piece) WEFT_REQUIRES(mutex_);
  void post_ring() WEFT_REQUIRES(mutex_);
  void post_direct() WEFT_REQUIRES(mutex_);
  void post_notes() WEFT_REQUIRES(mutex_);
  bool post_note(const Note& note) WEFT_REQUIRES(mutex_);
  bool posted(bool taken, Sent what) WEFT_REQUIRES(mutex_);

  QueuePair& pair_;
  const std::shared_ptr<RegistrationCache> registrations_;
  const std::string name_of_peer_;
  Mirror staging_;
  const Registration staged_;

  mutable Mutex mutex_;
  std::optional<Hello> peer_ WEFT_GUARDED_BY(mutex_);
  std::optional<Error> failure_ WEFT_GUARDED_BY(mutex_);
  bool wants_room_ WEFT_GUARDED_BY(mutex_) = false;
  bool has_news_ WEFT_GUARDED_BY(mutex_) = false;      // room has changed since write() returned
  std::uint64_t head_ WEFT_GUARDED_BY(mutex_) = 0;     // bytes posted to the ring in total
  std::size_t unposted_ WEFT_GUARDED_BY(mutex_) = 0;   // further bytes in the staging buffer
  std::uint64_t carried_ WEFT_GUARDED_BY(mutex_) = 0;  // bytes whose writes have completed
  std::uint64_t read_ WEFT_GUARDED_BY(mutex_) = 0;     // bytes that the peer has read
  // Messages that used a receive of the peer; wraps around.
  std::uint32_t messages_ WEFT_GUARDED_BY(mutex_) = 0;
  std::uint32_t granted_ WEFT_GUARDED_BY(mutex_) = 0;  // receives that the peer has posted again
  std::uint32_t my_grants_ WEFT_GUARDED_BY(mutex_) = 0;
  std::deque<Sent> outstanding_ WEFT_GUARDED_BY(mutex_);
  Direct direct_ WEFT_GUARDED_BY(mutex_);
  // Remaining bytes of a large piece without a place.
  std::size_t through_ring_ WEFT_GUARDED_BY(mutex_) = 0;
  bool withdrawn_ WEFT_GUARDED_BY(mutex_) = false;
  bool has_copied_ WEFT_GUARDED_BY(mutex_) = false;  // from a GPU, which is slow; logged once
  std::optional<Note> room_note_ WEFT_GUARDED_BY(mutex_);
  std::optional<Note> place_note_ WEFT_GUARDED_BY(mutex_);
  bool finish_due_ WEFT_GUARDED_BY(mutex_) = false;
};

}  // namespace weft::transport::verbs
