// SPDX-License-Identifier: Apache-2.0
// The world of the reinforcement learning examples: a pole on a cart that must be kept upright.
#pragma once

#include <cmath>
#include <random>
#include <vector>

namespace examples {

// A cart of 1 kg with a pole of 0.1 kg and 1 m, pushed left or right by 10 N fifty times a second.
// (Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning
// control problems", 1983.)
class CartPole {
 public:
  explicit CartPole(unsigned seed) : random_(seed) {}

  std::vector<float> reset() {
    std::uniform_real_distribution<double> small(-0.05, 0.05);
    x_ = small(random_);
    speed_ = small(random_);
    angle_ = small(random_);
    turn_ = small(random_);
    return state();
  }
  // Whether the pole still stands.
  bool push(bool right) {
    const double force = right ? 10 : -10;
    const double mass = 1.1;
    const double pole = 0.1 * 0.5;  // its mass times half its length
    const double common = (force + pole * turn_ * turn_ * std::sin(angle_)) / mass;
    const double turning = (9.8 * std::sin(angle_) - std::cos(angle_) * common) /
                           (0.5 * (4.0 / 3 - 0.1 * std::cos(angle_) * std::cos(angle_) / mass));
    const double pushing = common - pole * turning * std::cos(angle_) / mass;
    constexpr double kStep = 0.02;
    x_ += kStep * speed_;
    speed_ += kStep * pushing;
    angle_ += kStep * turn_;
    turn_ += kStep * turning;
    return std::abs(x_) < 2.4 && std::abs(angle_) < 12 * 2 * M_PI / 360;
  }
  std::vector<float> state() const {
    return {static_cast<float>(x_), static_cast<float>(speed_), static_cast<float>(angle_),
            static_cast<float>(turn_)};
  }

 private:
  std::mt19937 random_;
  double x_ = 0, speed_ = 0, angle_ = 0, turn_ = 0;
};

}  // namespace examples
