package partition

import (
	"errors"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
)

// Standalone is a partition that takes up a whole device, without a label or a daemon. Benchmarks and tests use it.
type Standalone struct {
	*Partition
	pool  *bufpool.Pool
	drive *drive.Drive
}

// OpenStandalone opens the partition on dev, or formats it if cfg says so. If cfg.PartitionBytes is 0, the partition is
// as long as the device. The caller must close the device after Close.
//
// Errors: those of Open.
func OpenStandalone(dev ssd.Device, cfg kvstore.Config) (*Standalone, error) {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 4 << 20}) // only for the drive's own scratch memory
	if err != nil {
		return nil, err
	}
	o, err := drive.New(drive.Config{Device: dev, Pool: pool})
	if err != nil {
		return nil, errors.Join(err, pool.Close())
	}
	if cfg.PartitionBytes == 0 {
		cfg.PartitionBytes = dev.Info().SizeBytes
	}
	p, err := Open(Config{Drive: o, Store: cfg})
	if err != nil {
		return nil, errors.Join(err, o.Close(), pool.Close())
	}
	return &Standalone{Partition: p, pool: pool, drive: o}, nil
}

// Close stops the partition and closes its drive. It waits for the last checkpoint for at most patience. Idempotent.
//
// Errors: those of Partition.Close. The drive is not closed then, because requests may still be in flight at the
// device.
func (s *Standalone) Close(patience time.Duration) error {
	if err := s.Partition.Close(patience); err != nil {
		return err
	}
	return errors.Join(s.drive.Close(), s.pool.Close())
}
