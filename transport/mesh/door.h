// SPDX-License-Identifier: Apache-2.0
// Listens for the connections of the ranks of a mesh, and of all groups that are made of these
// ranks later (JoinOptions::parent). So such a group needs no listener and no table of addresses of
// its own: its ranks know each other's from the first one.
//
// A peer is trusted that sends a hello with the first group's token, and before that proves that it
// knows the group's secret, if there is one (challenge.h); other connections are closed, with a
// warning in the log. The hello also names the group for which the peer connects. If this rank has
// not made that group yet, the connection waits, at most until the peer gives up. If this rank has
// left it, the Door tells the peer so (Answer::Left).
//
// The Openings of the groups own it together. Thread-safe; nothing blocks.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <weft/base/first_warnings.h>
#include <weft/base/mutex.h>
#include <weft/base/strangers.h>
#include <weft/transport/mesh/challenge.h>
#include <weft/transport/mesh/guest.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

class Door final : public std::enable_shared_from_this<Door> {
 public:
  // Listens for the group that `options` describe. Connections that arrive wait until open().
  // `place` begins the log's lines. Throws the connector's errors.
  static std::shared_ptr<Door> make(std::shared_ptr<Connector> connector, std::string backend,
                                    const JoinOptions& options, std::string place, Reroute reroute);
  ~Door();
  std::string address() const { return listener_->address(); }
  const std::shared_ptr<Connector>& connector() const { return connector_; }
  const Reroute& reroute() const { return reroute_; }
  // Whether a group of some of these ranks with these options uses this door. All its ranks find
  // the same.
  bool serves(const std::string& backend, const JoinOptions& options) const;

  // Takes in the connections of ranks that know this token.
  void open(const Token& token);
  Token token() const;
  // The challenge on one end of a connection to the rank `listener` of the first group; nothing if
  // that group has no secret.
  std::optional<Challenge> challenge(Side own, int listener) const;

  // Hands the connections for this group to its Openings from now on, on the loop.
  void enter(const Token& group, const std::shared_ptr<Openings>& openings);
  void leave(const Token& group) noexcept;

  // Called on the loop: the next message of a guest whose group is not known.
  void greet(const GuestPointer& guest, const Arrival& arrival) noexcept;
  // Stops waiting for the guest and returns its connection, if it still has one.
  std::shared_ptr<Connection> forget(const GuestPointer& guest) noexcept;

 private:
  Door(std::shared_ptr<Connector> connector, std::string backend, const JoinOptions& options,
       std::string place, Reroute reroute);
  struct Early {
    GuestPointer guest;
    Hello hello;
  };
  // Takes in a connection that was accepted. Limits the time for its hello and the number of
  // connections that have sent none.
  void admit(std::shared_ptr<Connection> connection);
  void challenged(const GuestPointer& guest, const Arrival& arrival) noexcept;
  void introduce(const GuestPointer& guest, const Hello& hello) noexcept;
  void turn_away(const GuestPointer& guest, const std::string& why) noexcept;
  void turn_away(Connection& connection, const std::string& why) noexcept;
  void cannot_take_in(const Error& why) noexcept;

  const std::shared_ptr<Connector> connector_;
  const std::string backend_;
  const JoinOptions options_;
  const std::string place_;
  const Reroute reroute_;  // may be empty
  std::unique_ptr<Listener> listener_;
  FirstWarnings warnings_;  // of connections that were turned away

  mutable Mutex mutex_;
  std::optional<Token> token_ WEFT_GUARDED_BY(mutex_);  // after open()
  // Before open(): connections that were accepted.
  Strangers<std::shared_ptr<Connection>> unread_ WEFT_GUARDED_BY(mutex_);
  // Before the first enter(): why connections are not accepted at present.
  std::optional<Error> short_ WEFT_GUARDED_BY(mutex_);
  Strangers<GuestPointer> strangers_ WEFT_GUARDED_BY(mutex_);  // that have sent no hello
  std::deque<Early> early_ WEFT_GUARDED_BY(mutex_);  // for groups that this rank has not made yet
  std::map<Token, std::weak_ptr<Openings>> groups_ WEFT_GUARDED_BY(mutex_);
  std::deque<Token> left_ WEFT_GUARDED_BY(mutex_);  // the last groups that this rank has left
};

}  // namespace weft::transport::mesh
