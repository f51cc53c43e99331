package partition

import (
	"errors"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/kvstore"
	"jbofd/internal/owner"
	"jbofd/internal/ssd"
)

// Alone is a partition that has a device to itself: no label, nobody to share with, no daemon.
type Alone struct {
	*Partition
	pool  *bufpool.Pool
	owner *owner.Owner
}

// OpenAlone opens the partition that takes up the whole device, or formats it if cfg says so.
// PartitionBytes is filled in where it is 0. The device is the caller's to close, after Close.
//
// Errors: those of Open.
func OpenAlone(dev ssd.Device, cfg kvstore.Config) (*Alone, error) {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 4 << 20}) // for what the owner itself needs
	if err != nil {
		return nil, err
	}
	o, err := owner.New(owner.Config{Device: dev, Pool: pool})
	if err != nil {
		return nil, errors.Join(err, pool.Close())
	}
	if cfg.PartitionBytes == 0 {
		cfg.PartitionBytes = dev.Info().SizeBytes
	}
	p, err := Open(Config{Owner: o, Store: cfg})
	if err != nil {
		return nil, errors.Join(err, o.Close(), pool.Close())
	}
	return &Alone{Partition: p, pool: pool, owner: o}, nil
}

// Close ends the partition in order, waiting for its last checkpoint as long as patience. Idempotent.
//
// Errors: those of Partition.Close, after which it is open still as far as the device goes.
func (a *Alone) Close(patience time.Duration) error {
	if err := a.Partition.Close(patience); err != nil {
		return err
	}
	return errors.Join(a.owner.Close(), a.pool.Close())
}
