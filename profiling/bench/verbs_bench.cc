// SPDX-License-Identifier: Apache-2.0
// Compares a verbs connection with perftest on the same device: one-way time of a small message,
// and bandwidth of large ones. Two processes of one machine. Without an RDMA device, the bench runs
// itself in the guest of tests/guest; its figures there compare the two programs and say nothing
// about hardware.
#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <vector>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/config.h>
#include <weft/base/make_error.h>
#include <weft/profiling/bench/report.h>
#include <weft/transport/registry.h>
#include <weft/transport/verbs/device.h>

namespace weft::bench {
namespace {

using transport::Arrival;
using transport::Connection;
using transport::verbs::Path;

constexpr int kRoundTrips = 100;  // round trips in one run
constexpr int kPort = 18'600;     // the first port of perftest; each run uses the next one

// Kills its process in the destructor.
struct Child {
  pid_t process;
  ~Child() {
    if (process <= 0) return;  // kill() would address many processes
    ::kill(process, SIGKILL);
    ::waitpid(process, nullptr, 0);
  }
};

Deadline patience() { return Deadline::in(std::chrono::seconds(120)); }

// Runs the other end: sends small messages back, and answers a large one with a small message when
// it has arrived completely.
[[noreturn]] void answer(int address_to) noexcept {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto verbs = transport::open("verbs");
  const auto loop = std::make_shared<EventLoop>("far");
  std::shared_ptr<Connection> kept;
  std::vector<std::byte> memory(64 << 20);
  const auto accepted = [&](std::shared_ptr<Connection> connection) {
    kept = std::move(connection);
    kept->receive({[&](const Arrival& arrival) {
                     const std::size_t bytes =
                         arrival.sizes.empty() ? 0 : static_cast<std::size_t>(arrival.sizes[0]);
                     const Slice place{memory.data(), bytes, Device::host()};
                     const std::span<const Slice> places(&place, arrival.sizes.size());
                     const std::string header(reinterpret_cast<const char*>(arrival.header.data()),
                                              arrival.header.size());
                     kept->accept(places, nullptr, {}).on_ended([&, header] {
                       if (header != "no answer")
                         kept->send(std::as_bytes(std::span(header)), {}, nullptr, {});
                     });
                   },
                   [](const Error&) { std::_Exit(0); }});
  };
  const auto listener = verbs->connector()->listen({loop, "", accepted});
  const std::string address = listener->address() + "\n";
  if (::write(address_to, address.data(), address.size()) < 0) std::_Exit(1);
  loop->drive([] { return false; });
  std::_Exit(0);
}

// A connection to that process.
class Lane {
 public:
  Lane() {
    int ends[2];
    if (::pipe(ends) != 0) throw system_error(Blame::Busy, "pipe", errno);
    child_.process = ::fork();
    if (child_.process == 0) answer(ends[1]);
    ::close(ends[1]);
    std::array<char, 256> line{};
    const auto count = ::read(ends[0], line.data(), line.size() - 1);
    ::close(ends[0]);
    if (count <= 1) throw Error(Blame::PeerLost, "the other process did not listen");
    verbs_ = transport::open("verbs");
    lane_ = verbs_->connector()->connect(
        std::string(line.data(), static_cast<std::size_t>(count - 1)), {loop_, patience()});
    lane_->receive({[this](const Arrival&) {
                      lane_->accept({}, nullptr, {});
                      ++answers_;
                    },
                    [this](const Error&) { ended_ = true; }});
  }

  void send(const char* header, const Slice& payload) {
    const std::span<const Slice> payloads(&payload, payload.bytes > 0 ? 1u : 0u);
    lane_->send(std::as_bytes(std::span(header, std::strlen(header))), payloads, nullptr, {});
  }
  void wait_for_answers(int count) {
    const int wanted = seen_ += count;
    if (!loop_->drive([&] { return ended_ || answers_ >= wanted; }, patience()) || ended_) {
      throw Error(Blame::PeerLost, "no answer came");
    }
  }

 private:
  Child child_{};
  std::shared_ptr<EventLoop> loop_ = std::make_shared<EventLoop>("near");
  std::shared_ptr<transport::Transport> verbs_;
  std::shared_ptr<Connection> lane_;
  std::atomic<int> answers_{0};
  std::atomic<bool> ended_{false};
  int seen_ = 0;
};

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Runs a program of perftest between two processes of this machine. Returns the number in column
// `column` of its result line, or nothing if it is not installed or printed no number, as happens
// now and then under emulation.
std::optional<double> perftest(const std::string& program, const Path& path, std::size_t bytes,
                               int count, int column) {
  static int port = kPort;
  const std::string common = program + " -F -d " + path.choice.port.device + " -x " +
                             std::to_string(path.choice.gid.index) + " -s " +
                             std::to_string(bytes) + " -n " + std::to_string(count) + " -p " +
                             std::to_string(++port);
  const Child server{::fork()};
  if (server.process == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::execl("/bin/sh", "sh", "-c", ("exec " + common + " > /dev/null 2>&1").c_str(), nullptr);
    std::_Exit(127);
  }
  // The client gives up at once if the server does not listen yet.
  for (int attempt = 0; attempt < 200; ++attempt) {
    FILE* const output =
        ::popen((common + " " + path.choice.gid.text() + " 2> /dev/null").c_str(), "r");
    if (output == nullptr) return std::nullopt;
    std::optional<double> found;
    std::array<char, 512> line{};
    while (std::fgets(line.data(), line.size(), output) != nullptr) {
      std::istringstream words(line.data());
      std::size_t size = 0;
      if (!(words >> size) || size != bytes) continue;
      double value = 0;
      for (int i = 1; i <= column && words >> value; ++i) {
      }
      if (words && value > 0 && value < 1e9) found = value;
    }
    if (::pclose(output) == 0) return found;
    if (::waitpid(server.process, nullptr, WNOHANG) != 0)
      return std::nullopt;  // perftest is not installed
  }
  return std::nullopt;
}

// A program of perftest, with its measurements.
struct Perftest {
  std::string name;
  Samples samples;
};

// Whether the shell finds the program; the words after its name are options.
bool is_there(const std::string& program) {
  return std::system(
             ("command -v " + program.substr(0, program.find(' ')) + " > /dev/null").c_str()) == 0;
}

void add(Report& report, const Row& weft, const std::vector<Perftest>& peers) {
  report.add(weft);
  for (const Perftest& peer : peers) {
    if (peer.samples.count() == 0) {
      report.note(peer.name + (is_there(peer.name) ? " printed no number"
                                                   : " is not installed: install perftest"));
      continue;
    }
    Row row = weft;
    row.peer = peer.name;
    row.p50 = peer.samples.quantile(0.5);
    row.p99 = peer.samples.quantile(weft.unit == "us" ? 0.99 : 0.01);
    row.runs = peer.samples.count();
    report.add(row);
  }
}

// perftest spins; with -e it sleeps on the completion channel, as a loop does that has been idle
// for 100 µs. If a round trip takes longer than that, as it does under emulation, only the second
// does the same work.
void one_way(Report& report, const Path& path, std::size_t bytes) {
  const std::string name = "one way, " + std::to_string(bytes) + " B";
  if (!report.wants(name)) return;
  Lane lane;
  Samples weft;
  std::vector<Perftest> peers{{"ib_send_lat", {}}, {"ib_send_lat -e", {}}};
  const std::string header(bytes, 'x');
  for (int run = 0; run <= report.runs(); ++run) {
    const double seconds = seconds_of([&] {
      for (int i = 0; i < kRoundTrips; ++i) {
        lane.send(header.c_str(), {});
        lane.wait_for_answers(1);
      }
    });
    if (run > 0) weft.add(seconds / kRoundTrips / 2);
    for (Perftest& peer : peers) {  // reads the column t_typical
      if (const auto time = perftest(peer.name, path, bytes, kRoundTrips, 4))
        peer.samples.add(*time);
    }
  }
  add(report, time_row(name, "weft", bytes, weft, 1e6, "us"), peers);
}

void stream(Report& report, const Path& path, std::size_t bytes) {
  const std::string name = "stream, " + std::to_string(bytes >> 10) + " KiB";
  if (!report.wants(name)) return;
  Lane lane;
  Samples weft;
  std::vector<Perftest> peers{{"ib_write_bw", {}}};
  std::vector<std::byte> memory(bytes, std::byte{1});
  const Slice payload{memory.data(), bytes, Device::host()};
  const int count = std::max(5, static_cast<int>((8u << 20) / bytes));
  for (int run = 0; run <= report.runs(); ++run) {
    const double seconds = seconds_of([&] {
      for (int i = 1; i < count; ++i) lane.send("no answer", payload);
      lane.send("answer", payload);
      lane.wait_for_answers(1);
    });
    if (run > 0) weft.add(seconds / count);
    for (Perftest& peer : peers) {  // reads the column "BW average", in MiB a second
      if (const auto rate = perftest(peer.name, path, bytes, count, 3))
        peer.samples.add(*rate * 1048576e-9);
    }
  }
  add(report, bandwidth_row(name, "weft", bytes, weft), peers);
}

// Runs this program in the guest, which prints the table; copies the rows from there.
int run_in_guest(int argc, char** argv) {
  if (std::getenv("WEFT_IN_GUEST") != nullptr) return 1;
  std::string arguments;
  std::string json;
  for (int i = 1; i < argc; ++i) {
    const bool is_file = i > 1 && std::strcmp(argv[i - 1], "--json") == 0;
    if (is_file) json = argv[i];
    arguments += is_file ? " /mnt/rows.json" : " '" + std::string(argv[i]) + "'";
  }
  std::array<char, 4096> program{};
  if (::readlink("/proc/self/exe", program.data(), program.size() - 1) < 0) return 1;
  const std::string command = std::string("python3 ") + GUEST_PY + " --cache " + GUEST_CACHE +
                              " --share " + GUEST_SHARE + " --task " + GUEST_TASK +
                              " --arguments \"" + arguments + "\" " + program.data();
  const int status = std::system(command.c_str());
  if (status != 0) return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  std::error_code failure;
  if (!json.empty()) {
    std::filesystem::copy_file(std::string(GUEST_SHARE) + "/rows.json", json,
                               std::filesystem::copy_options::overwrite_existing, failure);
  }
  return failure ? 1 : 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft::bench;
  Report report("verbs", argc, argv, 3);  // made before the guest boots, because it answers --help
  const auto library = weft::transport::verbs::Library::open();
  std::optional<weft::transport::verbs::Path> path;
  std::string why;
  try {
    if (!library) throw library.error();
    path = weft::transport::verbs::find_path(weft::transport::verbs::open_devices(library.value()),
                                             weft::config(), "");
  } catch (const weft::Error& error) {
    std::fprintf(stderr, "%s; the bench runs in a guest\n", error.what());
    return run_in_guest(argc, argv);
  }
  report.note("device " + path->name() + ", GID " + path->choice.gid.text());
  for (const std::size_t bytes : {8u, 2048u}) one_way(report, *path, bytes);
  for (const std::size_t bytes : {4096u, 65536u, 1u << 20}) stream(report, *path, bytes);
  return report.finish();
}
