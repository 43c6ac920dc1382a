// SPDX-License-Identifier: Apache-2.0
// Machines that do not answer. After a cable was cut, a rank has to find out which machines are
// behind it, and dialling one that is takes the whole time limit. So it asks all of them at once.
//
// Neighbours owns it. Used on the job's loop only; nothing blocks.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/descriptor.h>
#include <weft/base/event_loop.h>
#include <weft/engine/membership/published.h>

namespace weft::group {

// How long a machine may take to answer.
constexpr auto kDialPatience = std::chrono::seconds(10);

// True for the errno of a connection whose other machine does not answer.
bool is_no_answer(int error);

class SilentMachines : public std::enable_shared_from_this<SilentMachines> {
 public:
  explicit SilentMachines(std::shared_ptr<EventLoop> loop) : loop_(std::move(loop)) {}

  // Connects to each address, 64 at a time, and closes the connection when it is made. A machine
  // whose kernel refuses it answers too. Machines about which this rank has found out a moment ago
  // are not asked again.
  void ask(const std::vector<Published>& one_of_each_machine);
  // True if the machine was asked, and did not answer, in the last half minute.
  bool contains(const std::string& host) const;

 private:
  struct Asked {
    Published address;
    Descriptor socket;
    EventLoop::Registration next;   // its answer, or the time to ask again
    EventLoop::Registration limit;  // for its answer
  };
  struct Found {
    bool is_silent = false;
    Deadline holds;
  };
  void ask_more();
  // Returns false if the machine has answered at once, or cannot be asked.
  bool dial(Asked& one);
  void dial_again(const std::string& host);
  void on_event(const std::string& host);
  void note(const std::string& host, bool is_silent);

  const std::shared_ptr<EventLoop> loop_;
  std::deque<Published> waiting_;
  std::map<std::string, Asked> asked_;  // by host, like found_
  std::map<std::string, Found> found_;
};

}  // namespace weft::group
