// The file that one process writes for the timeline: a line of JSON for each thing, the header
// first. Its writer holds a lock on it as long as it lives, whatever ends it. Internal to
// profiling/trace; read by merge.cc.
//
//   {"weft":"timeline part
//   1","job":"…","rank":0,"ranks":2,"host":"…","machine":"…","pid":1,"ranges":true,
//    "offset":0,"error":0,"measured":0}   ranges: whether trace::Range writes any (WEFT_TRACE); and
//    the Clock at the start
//   {"thread":1,"name":"main"}
//   {"party":1,"kind":"group","name":"default","rank":0,"ranks":[0,1],"generation":0}
//   ["B",thread,time,"name","layer",bytes,rank]   a range begins      ["E",thread,time]   and ends
//   ["M",thread,time,"name","layer",bytes,rank]   a mark
//   ["O",ticket,thread,time,"kind",party,"name",sequence,peer,tag,bytes,"dtype",[shape]]   an
//   operation begins
//   ["F",ticket,thread,time,peer,sequence]   and ends; with the error as a seventh field if it
//   failed
//   ["L",thread,time,arrow]   an arrow leaves the range that the thread is in
//   ["A",thread,time,arrow]   and arrives
//   ["T",thread,time,ticket]   one arrives that left an operation
//   ["D",device,stream,begin,end,"name","layer",bytes,rank,error,arrow]   what a device did
//   ["X",thread,time]   from then on until the thread's next line events of it are missing
//   {"clock":5,"offset":0,"error":0}   the Clock at another time, by which the times between are
//   corrected
//   {"lost":12}   so many events there was no room for        {"end":time}   the process ended in
//   good order
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <weft/profiling/trace/lane.h>

namespace weft::trace::timeline {

class Part {
 public:
  // Throws Caller where the file cannot be made.
  Part(const std::string& folder, const Place& place, std::uint64_t most_bytes = kMostPart);
  ~Part();
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  const std::string& path() const { return path_; }
  // In a forked process, which would hold the lock as long as it lives.
  void forget_in_child() noexcept;
  void add_thread(const Lane& lane);
  void add(const Lane& lane, const Event& event);
  void add(const DeviceSpan& span);
  void add(const Clock& again);
  void add_end(std::uint64_t lost);  // events that never came here
  void flush();                      // the first failure to write is a warning

 private:
  int party(const Member& member);
  void text(const char* text);  // quoted
  void number(std::int64_t value);
  void write_line();  // if there is room for it
  void put_line();

  std::string path_;
  int descriptor_ = -1;
  std::string waiting_;  // lines that are to be written (not stdio's, which a forked process that
                         // exits would write as well)
  std::string line_;
  const std::uint64_t most_bytes_;
  std::uint64_t bytes_ = 0;
  std::uint64_t lost_ = 0;  // from the first line on that there was no room for
  bool failed_ = false;
  std::map<std::pair<const Party*, std::uint32_t>, int> parties_;
};

// Appends the text with the quotes and escapes of JSON. Bytes that are no ASCII pass as they are if
// they are UTF-8, else as '?'. Of std::string and std::pmr::string.
template <class String>
void append_quoted(String& to, std::string_view text);

}  // namespace weft::trace::timeline
