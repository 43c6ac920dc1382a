// SPDX-License-Identifier: Apache-2.0
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/config.h>
#include <weft/base/error.h>
#include <weft/base/tls_files.h>

namespace weft {
namespace {

Config from(const std::map<std::string, std::string>& variables) {
  return Config::from([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(Config, DefaultsAreQuiet) {
  const Config config = from({});
  EXPECT_EQ(config.log, LogLevel::Warn);
  EXPECT_EQ(config.debug, DebugLevel::Off);
  EXPECT_TRUE(config.socket_interfaces.empty());
}

TEST(Config, FindsUnknownVariables) {
  const char* const environment[] = {"PATH=/bin",      "WEFT_LOG=warn",   "WEFT_LOGG=debug",
                                     "WEFT_TIMEOUT=5", "MY_WEFT_LOG=off", "WEFT_BENCH_PYTHON=py3",
                                     nullptr};
  EXPECT_THAT(unknown_variables(environment), testing::ElementsAre("WEFT_LOGG", "WEFT_TIMEOUT"));
}

TEST(Config, LevelsAreCaseInsensitive) {
  EXPECT_EQ(from({{"WEFT_DEBUG", "DeTail"}}).debug, DebugLevel::Detail);
  EXPECT_EQ(from({{"WEFT_DEBUG", "info"}}).debug, DebugLevel::Info);
  EXPECT_EQ(from({{"WEFT_LOG", "OFF"}}).log, LogLevel::Off);
  EXPECT_EQ(from({{"WEFT_DEBUG", ""}}).debug, DebugLevel::Off);
}

TEST(Config, UnknownLevelErrorListsTheLevels) {
  try {
    from({{"WEFT_DEBUG", "verbose"}});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.what(),
                testing::HasSubstr("WEFT_DEBUG is 'verbose'; it takes off, info, detail"));
  }
}

TEST(Config, FilesAndAddressesStayUnchanged) {
  const Config config =
      from({{"WEFT_TIMELINE", "Run.json"}, {"WEFT_DUMP_DIR", "d"}, {"WEFT_METRICS", ":9400"}});
  EXPECT_EQ(config.timeline_file, "Run.json");
  EXPECT_EQ(config.dump_folder, "d");
  EXPECT_EQ(config.metrics_address, ":9400");
  EXPECT_EQ(config.status_file, "");
}

TEST(Config, TlsTakesAllThreeFilesOrNone) {
  const auto files_from = [](const std::map<std::string, std::string>& variables) {
    return TlsFiles::from([&](const char* name) {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
  };
  EXPECT_FALSE(files_from({}).given());
  EXPECT_FALSE(files_from({{"WEFT_TLS_CERT", ""}}).given());
  const TlsFiles files =
      files_from({{"WEFT_TLS_CERT", "a"}, {"WEFT_TLS_KEY", "b"}, {"WEFT_TLS_CA", "c"}});
  EXPECT_TRUE(files.given());
  EXPECT_EQ(files.certificate + files.key + files.authorities, "abc");
  try {
    from({{"WEFT_TLS_CERT", "a"}});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), testing::HasSubstr("TLS lacks WEFT_TLS_KEY and WEFT_TLS_CA: set"));
  }
  EXPECT_THROW(from({{"WEFT_TLS_KEY", "b"}, {"WEFT_TLS_CA", "c"}}), Error);
}

TEST(Config, CrashTracesAreOnOrOff) {
  EXPECT_FALSE(from({}).crash_trace);
  EXPECT_TRUE(from({{"WEFT_CRASH_TRACE", "On"}}).crash_trace);
  EXPECT_FALSE(from({{"WEFT_CRASH_TRACE", "off"}}).crash_trace);
  EXPECT_THROW(from({{"WEFT_CRASH_TRACE", "yes"}}), Error);
  EXPECT_TRUE(from({{"WEFT_LINE_OUTPUT", "on"}}).line_output);
}

TEST(Config, CopiesAreOneTwoOrMeasured) {
  EXPECT_EQ(from({}).shm_copies, ShmCopies::Auto);
  EXPECT_EQ(from({{"WEFT_SHM_COPIES", "1"}}).shm_copies, ShmCopies::One);
  EXPECT_EQ(from({{"WEFT_SHM_COPIES", "2"}}).shm_copies, ShmCopies::Two);
  EXPECT_EQ(from({{"WEFT_SHM_COPIES", "auto"}}).shm_copies, ShmCopies::Auto);
  EXPECT_THROW(from({{"WEFT_SHM_COPIES", "3"}}), Error);
}

TEST(Config, CollectivesInTwoLevelsCanBeTurnedOff) {
  EXPECT_EQ(from({}).hierarchy, Hierarchy::Auto);
  EXPECT_EQ(from({{"WEFT_HIERARCHY", "Auto"}}).hierarchy, Hierarchy::Auto);
  EXPECT_EQ(from({{"WEFT_HIERARCHY", "off"}}).hierarchy, Hierarchy::Off);
  EXPECT_THROW(from({{"WEFT_HIERARCHY", "2"}}), Error);
}

TEST(Config, SplitsLists) {
  EXPECT_THAT(from({{"WEFT_SOCKET_IFNAME", "eth0,,lo"}}).socket_interfaces,
              testing::ElementsAre("eth0", "lo"));
}

TEST(Config, BadNumberErrorStatesTheRange) {
  EXPECT_EQ(from({}).ib_gid_index, std::nullopt);
  EXPECT_EQ(from({{"WEFT_IB_GID_INDEX", "3"}}).ib_gid_index, 3);
  for (const char* text : {"16", "-1", "4x", "0x4", " 4"}) {
    try {
      from({{"WEFT_IB_SL", text}});
      FAIL() << "no error for '" << text << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.what(), testing::HasSubstr("it takes a number from 0 to 15"));
    }
  }
}

TEST(Config, TcpConnectionHas1To16Sockets) {
  EXPECT_EQ(from({}).tcp_sockets, 1);
  EXPECT_EQ(from({{"WEFT_TCP_SOCKETS", "16"}}).tcp_sockets, 16);
  for (const char* text : {"0", "17", "four"}) {
    try {
      from({{"WEFT_TCP_SOCKETS", text}});
      FAIL() << "no error for '" << text << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.what(), testing::HasSubstr("it takes a number from 1 to 16"));
    }
  }
}

TEST(Config, GpuDirectTakesFourWords) {
  EXPECT_EQ(from({}).gpu_direct, GpuDirect::Auto);
  EXPECT_EQ(from({{"WEFT_GPUDIRECT", "PeerMem"}}).gpu_direct, GpuDirect::PeerMemory);
  EXPECT_EQ(from({{"WEFT_GPUDIRECT", "dmabuf"}}).gpu_direct, GpuDirect::DmaBuf);
  EXPECT_EQ(from({{"WEFT_GPUDIRECT", "off"}}).gpu_direct, GpuDirect::Off);
  try {
    from({{"WEFT_GPUDIRECT", "yes"}});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.what(), testing::HasSubstr("it takes auto, dmabuf, peermem, off"));
  }
}

}  // namespace
}  // namespace weft
