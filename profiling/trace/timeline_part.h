// SPDX-License-Identifier: Apache-2.0
// The file that one process writes for the timeline: one line of JSON per item, the header first.
// The writer holds a lock on the file as long as it lives, however it ends. Internal to
// profiling/trace; read by timeline_part_reader.cc.
//
//   {"weft":"timeline part 1","job":"…","rank":0,"ranks":2,"host":"…","machine":"…","pid":1,
//    "ranges":true,"offset":0,"error":0,"measured":0}
//       the header; ranges: whether trace::Range writes any (WEFT_TRACE); then the first Clock
//   {"thread":1,"name":"main"}
//   {"party":1,"kind":"group","name":"default","rank":0,"ranks":[0,1],"generation":0}
//   ["B",thread,time,"name","layer",bytes,rank]   a range begins
//   ["E",thread,time]   a range ends
//   ["M",thread,time,"name","layer",bytes,rank]   a mark
//   ["O",ticket,thread,time,"kind",party,"name",sequence,peer,tag,bytes,"dtype",[shape]]
//       an operation begins; CalledBy::name() is a fourteenth field if there is one
//   ["F",ticket,thread,time,peer,sequence]
//       an operation ends; the error is a seventh field if it failed
//   ["L",thread,time,arrow]   an arrow leaves the thread's present range
//   ["A",thread,time,arrow]   an arrow arrives in the thread's present range
//   ["T",thread,time,ticket]   an arrow arrives there from an operation
//   ["D",device,stream,begin,end,"name","layer",bytes,rank,error,arrow]   a device span
//   ["X",thread,time]   events of the thread are missing from `time` until the thread's next line
//   {"clock":5,"offset":0,"error":0}   the Clock at another time; corrects the times in between
//   {"lost":12}   the number of events for which there was no room
//   {"end":time}   the process ended in good order
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <weft/profiling/trace/lane.h>

namespace weft::trace::timeline {

class Part {
 public:
  // Throws Caller if the file cannot be made.
  Part(const std::string& folder, const ProcessInJob& place, std::uint64_t most_bytes = kMostPart);
  ~Part();
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  const std::string& path() const { return path_; }
  // Closes the file in a forked process, which would otherwise hold the lock as long as it lives.
  void forget_in_child() noexcept;
  void add_thread(const Lane& lane);
  void add(const Lane& lane, const Event& event);
  void add(const DeviceSpan& span);
  void add(const Clock& again);
  void add_end(std::uint64_t lost);  // `lost`: events that were dropped before add()
  void flush();                      // logs a warning at the first failure to write

 private:
  int party(const Member& member);
  void text(const char* text);  // appends a quoted text
  void number(std::int64_t value);
  void write_line();  // drops the line if there is no room for it
  void put_line();

  std::string path_;
  // Lines that are to be written. Not in stdio's buffer, because a forked process that exits would
  // write that as well.
  int descriptor_ = -1;
  std::string waiting_;
  std::string line_;
  const std::uint64_t most_bytes_;
  std::uint64_t bytes_ = 0;
  std::uint64_t lost_ = 0;  // lines dropped because there was no room
  bool failed_ = false;
  std::map<std::pair<const MemberIdentity*, std::uint32_t>, int> parties_;
};

// Appends the text with the quotes and escapes of JSON. Replaces bytes that are not UTF-8 by '?'.
// For std::string and std::pmr::string.
template <class String>
void append_quoted(String& to, std::string_view text);

}  // namespace weft::trace::timeline
