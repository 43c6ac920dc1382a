// SPDX-License-Identifier: Apache-2.0
// Tests the text that is served at /metrics, and that a real Prometheus scrapes it.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <sstream>
#include <thread>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/base/error.h>
#include <weft/engine/instruments/metrics.h>
#include <weft/engine/launch/process.h>
#include <weft/mesh.h>
#include <weft/profiling/trace/depth.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/operation.h>
#include <weft/rpc.h>
#include <weft/tests/harness/ranks.h>

namespace weft::instruments {
namespace {

using testing::HasSubstr;

// Sends one HTTP/1.0 request and returns the response, or "" if nothing listens.
std::string get(int port, const std::string& path) {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string text;
  if (::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\nHost: localhost\r\n\r\n";
    [[maybe_unused]] const auto written = ::write(descriptor, request.data(), request.size());
    char buffer[4096];
    for (ssize_t count = 0; (count = ::read(descriptor, buffer, sizeof buffer)) > 0;)
      text.append(buffer, static_cast<std::size_t>(count));
  }
  ::close(descriptor);
  return text;
}

// Counts some operations and serves them, once per process. Returns the port.
int serve() {
  static const int served_at = [] {
    const int port = launch::free_port();
    const trace::Member member = trace::Member::join({"group", "default", 5, {}});
    const trace::About about{.name = "all_reduce", .bytes = 4096};
    trace::Operation earlier = trace::Operation::begin(member, trace::Kind::Collective, about);
    serve_metrics("127.0.0.1:" + std::to_string(port), 5);
    earlier.end();  // its beginning was not counted
    trace::Operation::begin(member, trace::Kind::Collective, about).end();
    trace::Operation::begin(member, trace::Kind::Collective, about)
        .fail(Error(Blame::PeerLost, "gone"));
    static_cast<void>(trace::Operation::begin(member, trace::Kind::Call, {.name = "f"}));
    trace::step(5);
    return port;
  }();
  return served_at;
}

class TakenPort {
 public:
  TakenPort() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    EXPECT_EQ(::bind(socket_, reinterpret_cast<const sockaddr*>(&address), bytes), 0);
    EXPECT_EQ(::listen(socket_, 1), 0);
    EXPECT_EQ(::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
    number_ = ntohs(address.sin_port);
  }
  ~TakenPort() { ::close(socket_); }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  int number() const { return number_; }

 private:
  const int socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int number_ = 0;
};

void expect_taken(const std::string& wanted, const TakenPort& taken) {
  try {
    serve_metrics(wanted, 0);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("127.0.0.1:" + std::to_string(taken.number())));
  }
}

TEST(Metrics, TakenPortErrorNamesIt) {
  const TakenPort taken;
  expect_taken("127.0.0.1:" + std::to_string(taken.number()), taken);
}

TEST(Metrics, PortAddsEveryLaunchersLocalRank) {
  ASSERT_EQ(std::getenv("LOCAL_RANK"), nullptr);
  const TakenPort taken;
  for (const char* variable : {"SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"}) {
    ::setenv(variable, "3", 1);
    expect_taken("127.0.0.1:" + std::to_string(taken.number() - 3), taken);
    ::unsetenv(variable);
  }
}

TEST(Metrics, CountOperationsBytesErrorsTimes) {
  const std::string text = get(serve(), "/metrics");
  EXPECT_THAT(text, HasSubstr("200 OK"));
  const std::string labels = R"({rank="5",group="default",kind="collective",name="all_reduce"} )";
  EXPECT_THAT(text, HasSubstr("weft_operations_total" + labels + "2\n"));
  EXPECT_THAT(text, HasSubstr("weft_bytes_total" + labels + "8192\n"));
  EXPECT_THAT(text,
              HasSubstr("weft_errors_total{rank=\"5\",blame=\"PeerLost\",kind=\"collective\"} 1"));
  EXPECT_THAT(text, HasSubstr("weft_in_flight{rank=\"5\",kind=\"call\"} 1"));
  EXPECT_THAT(text, HasSubstr("weft_in_flight{rank=\"5\",kind=\"collective\"} 0"));
  EXPECT_THAT(text, HasSubstr("weft_operation_seconds_count{rank=\"5\",kind=\"collective\"} 2"));
  EXPECT_THAT(text, HasSubstr("weft_steps_total{rank=\"5\"} 1"));
}

// Returns the value of a line, or -1 if there is no such line.
double value_of(const std::string& line) {
  const std::string text = get(serve(), "/metrics");
  const auto found = text.find("\n" + line + " ");
  return found == std::string::npos ? -1 : std::atof(text.c_str() + found + line.size() + 2);
}

TEST(Metrics, TellWaitsByBackendAndHost) {
  serve();
  static std::atomic<std::int64_t> now{1'000'000'000};  // nanoseconds
  trace::host_time().use_clock([] { return now.load(); });
  const std::string host = trace::host_name();
  const auto seconds = [&](const std::string& backend) {
    return value_of("weft_waited_seconds_total{rank=\"5\",host=\"" + host + "\",backend=\"" +
                    backend + "\"}");
  };
  const std::string share = "weft_waited_share{rank=\"5\",host=\"" + host + "\"}";
  trace::step(5);
  for (int i = 0; i < 40; ++i) {
    now += 750'000'000;
    const trace::WaitScope waits(i % 2 == 0 ? "gloo" : "nccl");
    now += 250'000'000;
    trace::step(5);
  }
  EXPECT_DOUBLE_EQ(seconds("gloo"), 5);
  EXPECT_DOUBLE_EQ(seconds("nccl"), 5);
  EXPECT_DOUBLE_EQ(value_of(share), 0.25);
  trace::host_time().use_clock(&trace::now);
}

TEST(Metrics, CountErrorsByBlame) {
  const trace::Member member = trace::Member::join({"agent", "worker5", 5, {}});
  const auto fail = [&](Blame blame) {
    trace::Operation::begin(member, trace::Kind::Served, {.name = "f"})
        .fail(Error(blame, "it failed"));
  };
  serve();
  for (int i = 0; i < 3; ++i) fail(Blame::Timeout);
  fail(Blame::Remote);
  EXPECT_EQ(value_of(R"(weft_errors_total{rank="5",blame="Timeout",kind="served"})"), 3);
  EXPECT_EQ(value_of(R"(weft_errors_total{rank="5",blame="Remote",kind="served"})"), 1);
  EXPECT_EQ(value_of(R"(weft_errors_total{rank="5",blame="Busy",kind="served"})"), -1);
}

TEST(Metrics, ShowPlacesInAMesh) {
  serve();
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"replicate", 1}, {"shard", 2}});
  });
  for (const std::string place : {"shard[0] of replicate[0]", "shard[1] of replicate[0]"}) {
    EXPECT_EQ(
        value_of("weft_operations_total{rank=\"5\",group=\"default/mesh1/shard of replicate[0]\","
                 "kind=\"meeting\",name=\"" +
                 place + "\"}"),
        1);
  }
}

TEST(Metrics, CountEachGroupOfAMesh) {
  serve();
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"replicate", 1}, {"shard", 2}});
    mesh["shard"].all_reduce(torch::ones({4})).wait();
  });
  EXPECT_EQ(
      value_of("weft_operations_total{rank=\"5\",group=\"default/mesh1/shard of replicate[0]\","
               "kind=\"collective\",name=\"all_reduce\"}"),
      2);
}

TEST(Metrics, NameAtMost64Groups) {
  serve();
  const auto count = [](int number) {
    const auto member = trace::Member::join({"group", "many" + std::to_string(number), 0, {0}});
    trace::Operation::note(member, trace::Kind::Collective, {.name = "scan"});
  };
  for (int i = 0; i < 100; ++i) count(i);
  const std::string text = get(serve(), "/metrics");
  const std::string scans = "kind=\"collective\",name=\"scan\"}";
  std::size_t series = 0;
  for (auto at = text.find(scans); at != std::string::npos; at = text.find(scans, at + 1)) ++series;
  EXPECT_GE(series, 2u * 60) << "operations and bytes; other tests may have named some groups";
  EXPECT_LE(series, 2u * 65);
  EXPECT_GE(value_of("weft_operations_total{rank=\"5\",group=\"(others)\"," + scans), 36);
}

// Maps each bucket's limit in seconds to the number of operations of that kind that took no longer.
std::map<double, double> buckets(const std::string& kind) {
  const std::string text = get(serve(), "/metrics");
  const std::string start = R"(weft_operation_seconds_bucket{rank="5",kind=")" + kind + R"(",le=")";
  std::map<double, double> counts;
  for (auto at = text.find(start); at != std::string::npos; at = text.find(start, at + 1)) {
    const auto limit = at + start.size();
    counts[std::strtod(text.c_str() + limit, nullptr)] =
        std::atof(text.c_str() + text.find("} ", limit) + 2);
  }
  return counts;
}

TEST(Metrics, BucketsAreCumulative) {
  constexpr std::int64_t kLeast = 3'000'000;
  serve();
  const trace::Member member = trace::Member::join({"agent", "worker5", 5, {}});
  const std::int64_t before = trace::now();
  trace::Operation traced =
      trace::Operation::begin(member, trace::Kind::Backward, {.name = "backward"});
  for (const std::int64_t begun = trace::now(); trace::now() - begun < kLeast;)
    std::this_thread::yield();
  traced.end();
  const double most = static_cast<double>(trace::now() - before) * 1e-9;
  const auto counts = buckets("backward");
  ASSERT_EQ(counts.size(), 24u) << "1 us to 60 s, and +Inf";
  EXPECT_DOUBLE_EQ(counts.begin()->first, 1e-6);
  EXPECT_DOUBLE_EQ(std::prev(counts.end(), 2)->first, 60);
  EXPECT_EQ(std::prev(counts.end())->second, 1);
  for (const auto& [seconds, count] : counts) {
    if (seconds < static_cast<double>(kLeast) * 1e-9) {
      EXPECT_EQ(count, 0) << seconds;
    }
    if (seconds >= most) {
      EXPECT_EQ(count, 1) << seconds;
    }
  }
}

// Called functions wait until the test opens the gate. They run in this process, whose memory the
// test shares.
std::promise<void> gate;
std::atomic<int> came{0};
int stand(int value) {
  ++came;
  static const std::shared_future<void> open = gate.get_future().share();
  open.wait();
  return value;
}
at::Tensor echo(at::Tensor tensor) { return tensor; }

TEST(Metrics, CountCallsQueuedHandlersAndBytes) {
  serve();
  auto store = c10::make_intrusive<c10d::HashStore>();
  rpc::Agent callee;
  std::thread other([&] {
    callee = rpc::init(
        "callee",
        {.rank = 1, .world_size = 2, .store = store, .worker_threads = 1, .transports = {"tcp"}});
  });
  rpc::Agent caller =
      rpc::init("caller", {.rank = 0, .world_size = 2, .store = store, .transports = {"tcp"}});
  other.join();
  constexpr int kCalls = 12;  // more than the one thread of the callee
  std::vector<Future<int>> calls;
  for (int i = 0; i < kCalls; ++i) calls.push_back(caller.async<&stand>("callee", i));
  const std::string in_flight = R"(weft_calls_in_flight{rank="5",peer="callee"})";
  const std::string queued = R"(weft_queued_handlers{rank="5",agent="callee"})";
  EXPECT_EQ(value_of(in_flight), kCalls);
  while (value_of(queued) + came < kCalls)
    std::this_thread::yield();  // until all have arrived; ctest's timeout limits it
  EXPECT_EQ(value_of(queued) + came, kCalls);
  EXPECT_GT(value_of(queued), 0);
  gate.set_value();
  for (int i = 0; i < kCalls; ++i) EXPECT_EQ(calls[static_cast<std::size_t>(i)].get(), i);
  EXPECT_EQ(value_of(in_flight), 0);
  EXPECT_EQ(value_of(queued), 0);

  const auto bytes = [](const char* kind, const char* function) {
    return value_of(std::string(R"(weft_bytes_total{rank="5",kind=")") + kind + R"(",name=")" +
                    function + "\"}");
  };
  constexpr std::int64_t kElements = 100'000;
  const at::Tensor sent = torch::ones({kElements});
  EXPECT_TRUE(caller.sync<&echo>("callee", sent).equal(sent));
  const std::string name = "weft::instruments::(anonymous namespace)::echo";
  const double payload = 2 * 4 * kElements;  // there and back
  for (const char* kind : {"call", "served"}) {
    EXPECT_GE(bytes(kind, name.c_str()), payload) << kind;
    EXPECT_LT(bytes(kind, name.c_str()), payload + 1000) << kind;
  }
  std::thread leaving([&] { callee.shutdown(); });
  caller.shutdown();
  leaving.join();
}

TEST(Metrics, ShowQueuedMessagesOfTransports) {
  serve();
  const trace::Waiting one(trace::depth(trace::Queue::Messages, "carrier pigeon"));
  EXPECT_EQ(value_of(R"(weft_queued_messages{rank="5",transport="carrier pigeon"})"), 1);
  {
    trace::Waiting other(trace::depth(trace::Queue::Messages, "carrier pigeon"));
    const trace::Waiting moved = std::move(other);
    EXPECT_EQ(value_of(R"(weft_queued_messages{rank="5",transport="carrier pigeon"})"), 2);
  }
  EXPECT_EQ(value_of(R"(weft_queued_messages{rank="5",transport="carrier pigeon"})"), 1);
}

// Runs in processes that have served nothing before.
TEST(MetricsOfRanks, AreServedAtTheGivenAddress) {
  const int ports[] = {launch::free_port(), launch::free_port()};
  harness::Processes ranks(2, [&](int rank) {
    // The process adds its LOCAL_RANK to the port.
    ::setenv("WEFT_METRICS", ("127.0.0.1:" + std::to_string(ports[rank] - rank)).c_str(), 1);
    ProcessGroupOptions options;
    options.backend = "tcp";
    options.device = c10::Device(c10::kCPU);
    auto group = init_process_group(options);
    for (int i = 0; i < 2; ++i) group.all_reduce(torch::ones({4})).wait();
    harness::Processes::say("there");
    for (;;) ::pause();
  });
  for (int rank = 0; rank < 2; ++rank) {
    ranks.wait_for(rank, "there");
    const std::string text = get(ports[rank], "/metrics");
    const std::string labels = "{rank=\"" + std::to_string(rank) +
                               "\",group=\"default\",kind=\"collective\",name=\"all_reduce\"}";
    EXPECT_THAT(text, HasSubstr("weft_operations_total" + labels + " 2\n"));
    EXPECT_THAT(text, HasSubstr("weft_bytes_total" + labels + " 32\n"));
  }
}

// The ranks of spawn() are forked like this from a program that has made a group before.
TEST(Metrics, ForkedProcessHasItsOwn) {
  const int parents = serve();
  const int port = launch::free_port();
  harness::Processes child(1, [&](int) {
    serve_metrics("127.0.0.1:" + std::to_string(parents), 6);  // taken, which is a warning
    serve_metrics("127.0.0.1:" + std::to_string(port), 7);
    const trace::Member member = trace::Member::join({"group", "default", 7, {}});
    trace::Operation::begin(member, trace::Kind::Collective, {.name = "all_reduce"}).end();
    harness::Processes::say("there");
    for (;;) ::pause();
  });
  child.wait_for(0, "there");
  EXPECT_THAT(get(port, "/metrics"), HasSubstr("weft_operations_total{rank=\"7\",group=\"default\","
                                               "kind=\"collective\",name=\"all_reduce\"} 1\n"));
}

TEST(Metrics, AreScrapedByPrometheus) {
  if (std::system("command -v prometheus > /dev/null 2>&1") != 0)
    GTEST_SKIP() << "no prometheus: install it to have /metrics scraped by it";
  std::string folder = std::filesystem::temp_directory_path() / "weft-prometheus-XXXXXX";
  ::mkdtemp(folder.data());
  const int port = serve();
  const int own = launch::free_port();
  std::ofstream(folder + "/prometheus.yml")
      << "global: {scrape_interval: 1s, scrape_timeout: 1s}\nscrape_configs:\n- "
         "job_name: weft\n  static_configs:\n  - targets: ['127.0.0.1:"
      << port << "']\n";
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string out = folder + "/log";
    if (std::freopen(out.c_str(), "w", stderr) == nullptr) ::_exit(126);
    const std::string config = "--config.file=" + folder + "/prometheus.yml";
    const std::string data = "--storage.tsdb.path=" + folder + "/data";
    const std::string listen = "--web.listen-address=127.0.0.1:" + std::to_string(own);
    ::execlp("prometheus", "prometheus", config.c_str(), data.c_str(), listen.c_str(),
             static_cast<char*>(nullptr));
    ::_exit(127);
  }
  // Asks until Prometheus has scraped; ctest's timeout limits it.
  std::string answer;
  while (answer.find("\"8192\"") == std::string::npos) {
    answer = get(own, "/api/v1/query?query=weft_bytes_total");
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, WNOHANG), 0)
        << "prometheus has ended: " << launch::describe_status(status);
    std::this_thread::yield();
  }
  EXPECT_THAT(answer, HasSubstr("all_reduce"));
  ::kill(child, SIGTERM);
  ::waitpid(child, nullptr, 0);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace weft::instruments
