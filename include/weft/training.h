// SPDX-License-Identifier: Apache-2.0
// Parts of a training step: AutocastGuard, GradScaler, clip_grad_norm_, SyncBatchNorm1d, 2d and 3d,
// convert_sync_batch_norm.
#pragma once

#include <weft/engine/training/autocast.h>
#include <weft/engine/training/clip_grad_norm.h>
#include <weft/engine/training/grad_scaler.h>
#include <weft/engine/training/sync_batch_norm.h>
#include <weft/group.h>
